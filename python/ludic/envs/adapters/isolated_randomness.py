"""Separate random state for libraries that draw from Python's and NumPy's global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


class IsolatedRandomness:
    """The state of `random` and `numpy.random` of one environment.

    While it is `active`, the global generators continue from this state; afterwards their own state
    is restored. Environments that play at the same time therefore do not affect each other, nor
    the rest of the process.
    """

    def __init__(self, seed: int | None = None) -> None:
        """`seed`: any integer; None for a random state."""
        import numpy as np

        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(None if seed is None else seed % 2**32).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Swap the state in. Do not `await` inside: other tasks would draw from it."""
        import numpy as np

        shared_python, shared_numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(shared_python)
            np.random.set_state(shared_numpy)
