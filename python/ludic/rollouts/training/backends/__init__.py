"""Backends with the document's methods, and the functions that build them."""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
