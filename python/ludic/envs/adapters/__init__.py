"""Adapters for environments of other libraries.

An adapter is imported when its name is first read, and its library when an environment is made:
importing this package needs none of them. A missing library is a `MissingExtraError` that names the
extra to install.
"""

from ludic._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
