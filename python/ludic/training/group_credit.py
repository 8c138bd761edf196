"""Credit by other comparisons in a group than its mean and standard deviation: several rewards
apart (GDPO), a greedy answer (ReMax), the best of k answers (Pass@k training)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ludic.errors import DataError, check_value
from ludic.training.credit_assignment import EpisodicReturn, GroupNormalizedReturn, Weights, group_key
from ludic.training.types import SAWBatch
from ludic.types import Rollout

GREEDY = "greedy"
"""Key of the meta of a group's greedy member."""


@dataclass
class EachRewardNormalized:
    """GDPO (arXiv:2601.05242): each reward is normalised in its group by `inner`. The weighted sum
    S of these is centred over the batch, and divided by (its standard deviation + `inner.eps`).

    The rewards come from `RewardFunctions`, by name; one that does not apply to an answer (None)
    adds 0. What else is in the return, such as an `OverlongPenalty`, is a further reward of weight
    1. `inner.normalize="sample"`, the paper's, is the deviation in the group and in the batch.

    Example, the paper's: of two answers the second is better by one reward, in another group by
    both. S is (-0.7071, 0.7071) and (-1.4142, 1.4142); GRPO has (-0.7071, 0.7071) for both.
    """

    inner: GroupNormalizedReturn
    weights: Mapping[str, float]

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        keys, sums = self.inner.compute(rollouts), {each.id: 0.0 for each in rollouts}  # raises for incomplete groups
        infos = {each.id: each.steps[-1].info for each in rollouts}
        rewards = [{id: info[key] for id, info in infos.items() if key in info} for key in map("rewards/{}".format, self.weights)]
        named = list(zip(self.weights.values(), rewards, strict=True))
        # the rest of the return, rounded: equal values may differ in their last digits
        rest = {each.id: round(each.total_reward - math.fsum(w * r.get(each.id, 0.0) for w, r in named), 6) for each in rollouts}
        in_group = replace(self.inner, allow_partial=True)
        for weight, found in [*named, (1.0, rest)]:
            apart = [
                replace(each, steps=[replace(each.steps[-1], reward=found[each.id])]) for each in rollouts if each.id in found
            ]
            for (id, _), advantage in in_group.compute(apart).items():
                sums[id] += weight * advantage
        total = np.round(list(sums.values()), 6)  # what cancels is 0, and flat groups stay at 0
        if total.any():
            total = total - np.round(total.mean(), 6)
            total = total / (total.std(ddof=self.inner.normalize == "sample") + self.inner.eps)
        credit = dict(zip(sums, total.tolist(), strict=True))
        return {(id, step): credit[id] for id, step in keys}


@dataclass
class GreedyBaselineReturn:
    """A_i = R_i - R of the greedy answer to the same prompt (ReMax, arXiv:2310.10505), which has
    A = 0: it is no sample of the policy, and `drop_greedy` leaves it out of the batch.

    `group_size` counts it: groups of `GRPORequestStrategy(n, greedy=True)` have n + 1 members.
    """

    group_size: int

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        """Raises DataError for a group without a greedy answer."""
        returns, groups = EpisodicReturn(self.group_size).compute(rollouts), _group_of_each(rollouts)
        greedy = {groups[each.id]: returns[each.id, each.steps[0].index] for each in rollouts if is_greedy(each.meta)}
        if without := set(groups.values()) - greedy.keys():
            raise DataError(
                f"groups without a greedy answer: {len(without)}; expand requests with GRPORequestStrategy(greedy=True)"
            )
        return {key: value - greedy[groups[key[0]]] for key, value in returns.items()}


def is_greedy(meta: Mapping[str, Any]) -> bool:
    """Whether a rollout or a sample is the greedy member of its group, read from its meta."""
    return bool((meta.get("request_meta") or {}).get(GREEDY))


def drop_greedy(batch: SAWBatch) -> SAWBatch:
    """Leave out the samples of greedy answers."""
    return replace(batch, items=[item for item in batch.items if not is_greedy(item.meta)])


@dataclass
class PassAtKReturn:
    """GRPO's advantage of sets of k answers, of which one must be right, averaged over the sets
    that have answer i: the analytic form of Pass@k training (arXiv:2508.10751, section 2.4).

    With F wrong answers of G, M = 1 - C(F, k) / C(G, k) and s = sqrt(M (1 - M)), right answers have
    (1 - M) / s, wrong ones (1 - M - C(F - 1, k - 1) / C(G - 1, k - 1)) / s; both 0 if s = 0.
    Example, k = 2: returns [1, 0, 0, 0] have M = s = 1/2 and advantages [1, -1/3, -1/3, -1/3].
    """

    group_size: int
    k: int

    def __post_init__(self) -> None:
        check_value("k", self.k, "answers are drawn from a group", whole=True, least=1, most=self.group_size)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        """Raises DataError for a return other than 0 and 1."""
        returns, groups = EpisodicReturn(self.group_size).compute(rollouts), _group_of_each(rollouts)
        if others := set(returns.values()) - {0.0, 1.0}:
            raise DataError(f"a return is {min(others)}; Pass@k training needs 1 for a right answer and 0 for a wrong one")
        wrong = Counter(groups[each.id] for each in rollouts if not returns[each.id, each.steps[0].index])
        return {key: self._advantage(value, wrong[groups[key[0]]]) for key, value in returns.items()}

    def _advantage(self, is_right: float, wrong: int) -> float:
        size, k = self.group_size, self.k
        fail = math.comb(wrong, k) / math.comb(size, k)
        if fail in (0.0, 1.0):
            return 0.0
        fail_with_this = 0.0 if is_right else math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)
        return (fail - fail_with_this) / math.sqrt(fail * (1 - fail))


def _group_of_each(rollouts: Sequence[Rollout]) -> dict[str, object]:
    return {each.id: group_key(each.meta, f"rollout {each.id}") for each in rollouts}
