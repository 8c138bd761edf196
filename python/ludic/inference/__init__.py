"""Chat clients: their interface, models in this process (`local`), and servers (`vllm`, `sglang`).

Importing this package loads no model library.
"""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
