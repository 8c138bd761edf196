"""Adapters for environments of other libraries.

An adapter is imported when its name is first read, its library when an environment is created. A
missing library is a `MissingExtraError` that names the extra to install.
"""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
