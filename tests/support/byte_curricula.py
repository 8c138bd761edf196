"""Curricula of a user's own."""


class Worst:
    """The problems with the lowest last means, new ones first."""

    def __init__(self, num_problems: int, seed: int, *, best: bool = False) -> None:
        self._problems, self._sign = range(num_problems), -1 if best else 1

    def pick(self, seen, count, step, rng):
        def key(problem: int) -> float:
            return self._sign * seen[problem].means[-1] if problem in seen and seen[problem].means else -2

        return sorted(self._problems, key=key)[:count]


class Unpicking:
    """Has no `pick`."""

    def __init__(self, num_problems: int, seed: int) -> None:
        self._num_problems = num_problems


class Wrong(Unpicking):
    """Picks a problem that the list does not have."""

    def pick(self, seen, count, step, rng):
        return [self._num_problems] * count
