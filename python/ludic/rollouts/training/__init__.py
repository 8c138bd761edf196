"""Samples, rollout configurations, the rollout manager, data buffers, backends and loops.

A name is imported on first access: types, filters, buffers and metrics need no torch.
"""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
