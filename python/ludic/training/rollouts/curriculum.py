"""Which problems of a list are played next, by the rewards of their groups so far.

problem 3: group means 0.25, 1, 1     easy: its last mean is at least `easy`
problem 7: group means 0.5            fit
problem 9: group means 0, 0           hard, and retired after two such groups in a row
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, cycle, islice, pairwise
from random import Random
from typing import Any, NamedTuple

from ludic.data.passes import shuffle_range
from ludic.errors import ConfigError, check_value, did_you_mean

EASY, FIT, HARD, RETIRED = "easy", "fit", "hard", "retired"
KEPT_MEANS = 8
"""Of a problem, the means of its last groups are kept."""


class Seen(NamedTuple):
    """The history of a problem that was picked before."""

    step: int
    """The batch, from 0, for which it was picked last."""
    means: tuple[float, ...]
    """The mean rewards of its groups, the oldest first; empty until the first has come."""


class DifficultyPools:
    """Draws each batch from pools of easy, fit and hard problems by their shares.

    A problem belongs to the pool of its last group mean: `easy` if it is at least that value,
    `hard` if at most that one, else fit. Problems that were not picked yet are fit, and come first,
    in an order that follows from `seed`; then those that were picked longest ago.

    `shares`: the relative sizes of the three parts of a batch. A part is rounded up or down at
    random, so that its mean is exact (systematic sampling). What a pool lacks comes from fit
    problems, then from easy and hard ones, then from retired ones; each time those picked longest
    ago.

    After `retire_after` groups in a row that were all easy or all hard a problem is retired; it
    returns to its pool `readmit_after` batches after its last pick, and retires again if its next
    group is no different. None means never.
    """

    def __init__(
        self,
        num_problems: int,
        seed: int,
        *,
        easy: float = 1.0,
        hard: float = 0.0,
        shares: Mapping[str, float] | None = None,
        retire_after: int | None = 2,
        readmit_after: int | None = 20,
    ) -> None:
        """Raises ConfigError for values out of bounds and unknown names of pools."""
        where = "curriculum.args"
        check_value(f"{where}.easy", easy, "it is the mean reward from which a problem is easy", above=hard)
        check_value(
            f"{where}.retire_after", retire_after, "null retires none", least=1, most=KEPT_MEANS, whole=True, optional=True
        )
        check_value(f"{where}.readmit_after", readmit_after, "null is never", least=1, whole=True, optional=True)
        given = {EASY: 0.1, FIT: 0.8, HARD: 0.1, **(shares or {})}
        for name, share in given.items():
            if name not in (EASY, FIT, HARD):
                raise ConfigError(f"{where}.shares ({name}) must be easy, fit or hard{did_you_mean(name, (EASY, FIT, HARD))}")
            check_value(f"{where}.shares.{name}", share, "it is the part of the pool in a batch", least=0, below=math.inf)
        total = sum(given.values())
        check_value(f"the sum of {where}.shares", total, "give at least one pool a part", above=0)
        self._bounds = [0.0, *(part / total for part in accumulate(given.values()))]
        self._easy, self._hard, self._retire_after, self._readmit_after = easy, hard, retire_after, readmit_after
        self._order = shuffle_range(num_problems, f"curriculum {seed}")

    def pick(self, seen: Mapping[int, Seen], count: int, step: int, rng: Random) -> list[int]:
        """`count` problems for batch `step`; one twice only if there are fewer."""
        pools = self.sort(seen, step)
        unseen = islice((problem for problem in self._order if problem not in seen), count)
        pools[FIT] = [*unseen, *pools[FIT]]
        offset = rng.random()
        ends = [math.ceil(bound * count - offset) for bound in self._bounds]
        parts = zip((EASY, FIT, HARD), pairwise(ends), strict=True)
        chosen = dict.fromkeys(chain.from_iterable(pools[name][: end - start] for name, (start, end) in parts))
        others = sorted([*pools[EASY], *pools[HARD]], key=lambda problem: seen[problem].step)
        chosen |= dict.fromkeys(chain(pools[FIT], others, pools[RETIRED]))
        return list(islice(cycle(chosen), count))

    def measure(self, seen: Mapping[int, Seen], picks: Sequence[int], step: int) -> dict[str, float]:
        """The sizes of the pools and the share of each in `picks`. Problems that were not picked
        before are counted apart."""
        pools = self.sort(seen, step)
        sizes: dict[str, float] = {name: len(problems) for name, problems in pools.items()}
        members = {name: set(problems) for name, problems in pools.items()} | {"unseen": set(picks) - set(seen)}
        shares = {f"picked_{name}": sum(pick in found for pick in picks) / len(picks) for name, found in members.items()}
        return {**sizes, "unseen": len(self._order) - len(seen), **shares}

    def sort(self, seen: Mapping[int, Seen], step: int) -> dict[str, list[int]]:
        """The problems of `seen` by pool, in each those first that were picked longest ago."""
        pools: dict[str, list[int]] = {EASY: [], FIT: [], HARD: [], RETIRED: []}
        for problem in sorted(seen, key=lambda problem: (seen[problem].step, problem)):
            last, means = seen[problem]
            kinds = [EASY if mean >= self._easy else HARD if mean <= self._hard else FIT for mean in means]
            kind, streak = kinds[-1] if kinds else FIT, self._retire_after
            is_retired = streak is not None and kind != FIT and kinds[-streak:] == [kind] * streak
            if is_retired and (self._readmit_after is None or step < last + self._readmit_after):
                kind = RETIRED
            pools[kind].append(problem)
        return pools


POLICIES: dict[str, Any] = {"pools": DifficultyPools}
"""Name in a recipe (`curriculum.kind`) -> the class."""
