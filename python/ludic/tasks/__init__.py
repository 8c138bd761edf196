"""Tasks: problems with their environment, demonstrations and held-out sets. The built-in ones are
learnt on a laptop's CPU in a minute or two; `data_task` is made from your data and rewards."""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
