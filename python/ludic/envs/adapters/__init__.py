"""Environments of other libraries as environments of ours.

Each adapter is imported when it is first asked for, and its library when an environment is made:
importing this package needs none of them. A library that is missing is a `MissingExtraError` that
names the extra to install.
"""

from ludic._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
