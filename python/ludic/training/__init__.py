"""Losses, credit, batching and the trainer. A name is imported when it is first read; torch is all
that they need."""

from ludic._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
