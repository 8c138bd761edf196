"""Clients of language models: their interfaces, models in this process, and servers.

Importing it loads no model library.
"""

from ludic._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
