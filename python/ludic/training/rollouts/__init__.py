"""From requests to samples: requests, the engine that plays them, the rollout log, and the
conversion of steps to samples.

Imports go `rollouts` <- `samples` <- `batching`; this package imports neither of the other two.
"""
