"""The loops: supervised fine-tuning and reinforcement learning."""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
