"""Where the model, its optimizer and its device are: forward, backward, optimizer step, save and
load. Names are imported when they are first asked for."""

from ludic._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
