"""Batch sources and micro-batches. A name is imported on first access."""

from ludic._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
