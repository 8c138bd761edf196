"""Requests whose problems a curriculum picks, and its state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from types import MappingProxyType
from typing import Any

from ludic.errors import ConfigError
from ludic.runs.rollouts import PassRequests
from ludic.tasks import Episode
from ludic.training.rollouts.curriculum import KEPT_MEANS, Seen
from ludic.training.types import RolloutRequest
from ludic.types import Rollout

STATE = "curriculum"
"""Key of the state."""
PICK, PROBLEM = "pick", "problem_index"
"""Keys in the meta of a request: the position of its problem among all picks, and its number in the
list."""


class CurriculumRequests(PassRequests):
    """The requests of a run with `curriculum`. `policy` picks the problems of a block of `prompts`
    positions when the first of them is requested.

    The group means that it sees change only between batches, in the order of positions, so that the
    picks for a batch do not depend on which of its groups comes first.
    """

    def __init__(self, *args: Any, policy: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._policy, self._step = policy, -1
        self._seen: dict[int, Seen] = {}
        self._picks: dict[int, list[int]] = {}
        """Number of a block -> its problems, for the blocks that may be requested again."""
        self._means: dict[int, tuple[int, float]] = {}
        """Position -> (problem, mean reward) of the groups since the last batch was requested."""

    def begin_batch(self, number: int, oldest: int | None = None) -> None:
        super().begin_batch(number)
        if number == self._step:  # it was requested before the run was stopped
            return
        for _, (problem, mean) in sorted(self._means.items()):
            step, means = self._seen[problem]
            self._seen[problem] = Seen(step, (*means, mean)[-KEPT_MEANS:])
        first = max(self._picks, default=0) if oldest is None else oldest // self._section.prompts
        self._picks = {block: picks for block, picks in self._picks.items() if block >= first}
        self._step, self._means = number, {}

    def list_problems(self, number: int) -> list[RolloutRequest]:
        if number not in self._picks:
            self._picks[number] = self._pick(number)
        start = number * self._section.prompts
        return [
            replace(request, meta={**request.meta, PICK: start + offset, PROBLEM: problem})
            for offset, (request, problem) in enumerate(zip(super().list_problems(number), self._picks[number], strict=True))
        ]

    def _pick(self, number: int) -> list[int]:
        seen, count, rng = MappingProxyType(self._seen), self._section.prompts, Random(f"curriculum {self._seed} {number}")
        picks, total = list(self._policy.pick(seen, count, self._step, rng)), len(self._data.training)
        if len(picks) != count or not all(type(pick) is int and 0 <= pick < total for pick in picks):
            raise ConfigError(f"the curriculum picked {picks!r:.80}; pick must return {count} numbers from 0 to {total - 1}")
        if hasattr(self._policy, "measure"):
            measured = self._policy.measure(seen, picks, self._step)
            self.metrics = {f"groups/{name}": float(value) for name, value in measured.items()}
        for pick in picks:
            self._seen[pick] = Seen(self._step, self._seen[pick].means if pick in self._seen else ())
        return picks

    def _choose_problem(self, rng: Random, number: int, position: int) -> Episode:
        return self._data.training[self._picks[number][position]]

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        rewards: dict[tuple[int, int], list[float]] = {}
        for rollout in rollouts:
            rewards.setdefault((rollout.meta[PICK], rollout.meta[PROBLEM]), []).append(rollout.total_reward)
        self._means |= {position: (problem, fmean(values)) for (position, problem), values in rewards.items()}

    def state_dict(self) -> dict[str, Any]:
        """The position, the group means that the policy sees and those that came since, and the
        picks that may be requested again."""
        saved = {
            "step": self._step,
            "seen": [[problem, step, list(means)] for problem, (step, means) in self._seen.items()],
            "picks": [[block, list(picks)] for block, picks in self._picks.items()],
            "means": [[position, *mean] for position, mean in self._means.items()],
        }
        return {**super().state_dict(), STATE: saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError for the state of a run without curriculum, and for changed data."""
        if STATE not in state:
            raise ConfigError("the checkpoint is of a run without curriculum; resume with curriculum.kind=null")
        super().load_state_dict(state)
        saved = state[STATE]
        self._step = saved["step"]
        self._seen = {problem: Seen(step, tuple(means)) for problem, step, means in saved["seen"]}
        self._picks = {block: list(picks) for block, picks in saved["picks"]}
        self._means = {position: (problem, mean) for position, problem, mean in saved["means"]}
