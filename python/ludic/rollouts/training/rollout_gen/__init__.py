"""Generates batches of samples: concurrently with the manager, or one after another.

A name is imported on first access; none of them needs torch.
"""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
