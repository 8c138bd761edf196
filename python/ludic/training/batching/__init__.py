"""Batch sources and packing: from samples to mini-batches and micro-batches.

This package imports `training.rollouts` and `training.samples`; they do not import it. The names it
re-exports are imported on first use.
"""

from ludic._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
