"""Evaluation: accuracy, avg@k and pass@k with confidence intervals, and your own metrics, from
episodes that are played for it. Failures are counted."""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
