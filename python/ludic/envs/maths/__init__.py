"""Problems whose answer is a mathematical expression: environments, reward functions and their
grader."""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
