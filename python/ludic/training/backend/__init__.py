"""Backends: they have the model and its optimizer, and do forward, backward, optimizer steps,
saving and loading. A name is imported when it is first read."""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
