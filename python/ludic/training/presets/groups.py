"""The group size of algorithms that learn from what differs within a group."""

from __future__ import annotations

from ludic.errors import ConfigError


def compared(group_size: int) -> int:
    """`group_size`. Raises ConfigError for 1: an answer that is compared with itself has
    advantage 0, always."""
    if group_size == 1:
        raise ConfigError(
            "group_size (1) must be at least 2: an answer is compared with the others to its prompt, and one alone teaches nothing; "
            "raise it (rollout.group_size of a recipe), or use make_reinforce_baseline"
        )
    return group_size
