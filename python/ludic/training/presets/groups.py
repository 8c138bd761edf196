"""Credit of algorithms that learn from what differs within a group."""

from __future__ import annotations

from ludic.errors import ConfigError
from ludic.training.credit_assignment import GroupNormalizedReturn


def group_return(group_size: int, normalize_adv: bool, positive_only: bool = False) -> GroupNormalizedReturn:
    """Returns compared within groups of at least 2."""
    return GroupNormalizedReturn(check_group_size(group_size), normalize_adv=normalize_adv, positive_only=positive_only)


def check_group_size(group_size: int) -> int:
    """`group_size`. Raises ConfigError for 1: an answer compared with itself always has advantage
    0."""
    if group_size == 1:
        raise ConfigError(
            "group_size (1) must be at least 2: an answer is compared with the others to its prompt, and one alone teaches nothing; "
            "raise it (rollout.group_size of a recipe), or use make_reinforce_baseline"
        )
    return group_size
