"""Randomness of one's own for libraries that draw from the interpreter's shared generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


class OwnRandomness:
    """The state of `random` and `numpy.random` that belongs to one environment.

    While it is `active`, draws from the shared generators continue this state; outside, theirs is
    as if nothing had been drawn. So environments that play at the same time do not disturb each
    other, nor anything else in the process.
    """

    def __init__(self, seed: int | None = None) -> None:
        """`seed`: any integer; None begins anywhere."""
        import numpy as np

        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(None if seed is None else seed % 2**32).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Not to be held over an `await`: the shared generators are this environment's within."""
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
