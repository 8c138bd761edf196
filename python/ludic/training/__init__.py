"""Losses, credit, batching and the trainer.

A name is imported on first access. None of them needs more than torch.
"""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
