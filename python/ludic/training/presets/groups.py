"""Group-relative credit: returns compared within a group of answers to one prompt."""

from __future__ import annotations

from ludic.errors import ConfigError
from ludic.training.credit_assignment import GroupNormalizedReturn


def group_return(group_size: int, normalize_adv: bool, positive_only: bool = False) -> GroupNormalizedReturn:
    """Return the credit assigner for groups of at least 2."""
    return GroupNormalizedReturn(check_group_size(group_size), normalize_adv=normalize_adv, positive_only=positive_only)


def check_group_size(group_size: int) -> int:
    """Return `group_size`. Raises ConfigError for 1: an answer that is compared only with itself
    always has advantage 0."""
    if group_size == 1:
        raise ConfigError(
            "group_size (1) must be at least 2: an answer is compared with the other answers to its prompt, and the advantage of a "
            "single answer is always 0; raise it (rollout.group_size in a recipe), or use make_reinforce_baseline"
        )
    return group_size
