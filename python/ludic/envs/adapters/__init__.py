"""Environments of other libraries as environments of ours.

A name is imported when it is first read, and its library when an environment is created: importing
this package needs none of them. A missing library is a `MissingExtraError` that names the extra to
install.
"""

from ludic._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
