"""Requests to rollouts, and rollouts to samples: the requests, the engine that plays them, its log.

Imports go `rollouts` <- `samples` <- `batching`; this package imports neither of the other two.
"""
