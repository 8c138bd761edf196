"""Controllers: each sets coefficients of an algorithm, once a training step, from what the step
showed. Plain float64 arithmetic without torch."""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
