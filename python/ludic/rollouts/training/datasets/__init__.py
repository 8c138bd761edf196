"""Prompts and samples from data: the buffer of prompts, and data sets for fine-tuning.

A name is imported on first access; the buffer needs no torch.
"""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
