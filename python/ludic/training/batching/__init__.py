"""From requests to micro-batches. Every name is imported when it is first asked for."""

from ludic._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
