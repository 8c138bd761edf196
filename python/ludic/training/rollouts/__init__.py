"""Requests to samples: what to play, the engine that plays it, its log, and the samples of a
rollout's steps.

Imports go `rollouts` <- `samples` <- `batching`; this package imports neither of the other two.
"""
