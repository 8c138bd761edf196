"""Filters of groups of samples, under their documented path; the code is in
`ludic.training.rollouts.group_filters`."""

from ludic.training.rollouts.group_filters import (
    GroupFilter,
    check_any_success,
    check_min_reward,
    check_quality_and_diversity,
    check_reasonable_length,
    check_response_diversity,
    check_reward_nonzero_std,
    make_length_filter,
    make_threshold_filter,
)

__all__ = [
    "GroupFilter",
    "check_any_success",
    "check_min_reward",
    "check_quality_and_diversity",
    "check_reasonable_length",
    "check_response_diversity",
    "check_reward_nonzero_std",
    "make_length_filter",
    "make_threshold_filter",
]
