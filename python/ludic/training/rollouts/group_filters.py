"""Filters of groups: whether the answers to one prompt are worth training on.

They see a group after its rewards and before its credit, so that a refused group can be replaced by
the next prompt. Filters of `algorithm` work on batches, after credit.

    answers "4", "4", "5" with rewards 1, 1, 0
        check_reward_nonzero_std    True: the rewards differ
        check_response_diversity    True: 2 of 3 answers are different, at least half
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ludic.errors import ConfigError, DataError, check_value
from ludic.types import Rollout, read_list

GroupFilter = Callable[[Sequence[Any]], bool]
"""The members of one group -> whether they are trained. A member is a `rollouts.training.Sample`,
or a `RolloutMember`, which has the same fields."""


def check_reward_nonzero_std(samples: Sequence[Any]) -> bool:
    """Whether the rewards differ. A group of equal rewards has no relative advantage (DAPO,
    arXiv:2503.14476, dynamic sampling); nor has a group of one, for which this is False."""
    rewards = _rewards_of(samples)
    return min(rewards) < max(rewards)


def check_min_reward(samples: Sequence[Any], threshold: float = 0.5) -> bool:
    """Whether any reward is above `threshold`; equal is not above."""
    return max(_rewards_of(samples)) > threshold


def check_response_diversity(samples: Sequence[Any], min_unique_ratio: float = 0.5) -> bool:
    """Whether at least `min_unique_ratio` of the responses are different as text. Example: 2
    different ones of 4 are 0.5."""
    check_value("min_unique_ratio", min_unique_ratio, "it is a part of the responses", least=0, most=1)
    _require_members(samples)
    return len({sample.response for sample in samples}) >= min_unique_ratio * len(samples)


def check_reasonable_length(samples: Sequence[Any], min_tokens: int = 10, max_tokens: int = 2048) -> bool:
    """Whether the mean number of tokens, prompt included, is at least `min_tokens` and
    at most `max_tokens`."""
    _check_bounds(min_tokens, max_tokens)
    _require_members(samples)
    return min_tokens * len(samples) <= sum(len(sample.tokens) for sample in samples) <= max_tokens * len(samples)


def check_any_success(samples: Sequence[Any]) -> bool:
    """Whether any answer ended by itself: its status is `completed`."""
    _require_members(samples)
    return any(sample.status.value == "completed" for sample in samples)


def check_quality_and_diversity(samples: Sequence[Any]) -> bool:
    """Both `check_reward_nonzero_std` and `check_response_diversity`."""
    return check_reward_nonzero_std(samples) and check_response_diversity(samples)


COMPARING = (check_reward_nonzero_std, check_quality_and_diversity)
"""Filters that compare the members of a group, and so refuse every group of one."""
GROUP_FILTERS: dict[str, GroupFilter] = {
    "nonzero_std": check_reward_nonzero_std,
    "any_success": check_any_success,
    "response_diversity": check_response_diversity,
    "quality_and_diversity": check_quality_and_diversity,
}
"""Name in a recipe (`rollout.group_filter`) -> the filter."""


def make_threshold_filter(threshold: float) -> GroupFilter:
    """`check_min_reward` with this threshold."""
    return _named(lambda samples: check_min_reward(samples, threshold), f"check_min_reward({threshold})")


def make_length_filter(min_tokens: int, max_tokens: int) -> GroupFilter:
    """`check_reasonable_length` with these bounds."""
    _check_bounds(min_tokens, max_tokens)
    name = f"check_reasonable_length({min_tokens}, {max_tokens})"
    return _named(lambda samples: check_reasonable_length(samples, min_tokens, max_tokens), name)


def of_rollouts(group_filter: GroupFilter) -> Callable[[Sequence[Rollout]], bool]:
    """The same filter for rollouts. The reward is the episode's, the response is the model's text
    of all steps, and the tokens belong to the last step, whose prompt has the earlier ones."""
    return _named(lambda rollouts: group_filter(list(map(RolloutMember, rollouts))), name_of_filter(group_filter))


def name_of_filter(group_filter: Callable[..., Any]) -> str:
    """The name under which refusals are counted."""
    return getattr(group_filter, "__name__", type(group_filter).__name__)


class _Ending(Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"


@dataclass(frozen=True)
class RolloutMember:
    """A rollout as a filter sees it."""

    rollout: Rollout

    @property
    def reward(self) -> float:
        return self.rollout.total_reward

    @property
    def response(self) -> str:
        return "\n".join(step.action for step in self.rollout.steps)

    @property
    def tokens(self) -> Sequence[int]:
        """Ids of the prompt, then of the response."""
        trace = self.rollout.steps[-1].trace if self.rollout.steps else None
        if trace is None:
            raise DataError(f"the last step of rollout {self.rollout.id} has no token trace; sample with ReturnSpec.for_rl()")
        return [*read_list(trace, "prompt_token_ids"), *read_list(trace, "completion_token_ids")]

    @property
    def status(self) -> _Ending:
        """`completed` if the answer ended by itself."""
        ended = bool(self.rollout.steps) and self.rollout.steps[-1].terminated
        return _Ending.COMPLETED if ended else _Ending.TRUNCATED


def _named(check: GroupFilter, name: str) -> GroupFilter:
    check.__name__ = name
    return check


def _require_members(samples: Sequence[Any]) -> None:
    if not samples:
        raise DataError("a filter judges the samples of one prompt, and was given none")


def _rewards_of(samples: Sequence[Any]) -> list[float]:
    """The rewards. Raises DataError for one that is not finite, which no filter could judge."""
    _require_members(samples)
    rewards = [float(sample.reward) for sample in samples]
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise DataError(f"the reward of sample {index} of the group is {reward}; rewards must be finite")
    return rewards


def _check_bounds(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise ConfigError(f"min_tokens ({min_tokens}) must be at most max_tokens ({max_tokens}); no group has such a length")
