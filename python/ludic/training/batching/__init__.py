"""Samples to batches: sources of batches, packing, micro-batches. A name is imported when it is
first read; some are re-exported from `training.rollouts`."""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
