"""Clients of language models: the interfaces, an engine in this process, and servers with OpenAI's
interface.

Importing it loads no model library.
"""

from ludic._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
