"""Filters of groups, by numbers worked by hand, on samples and on rollouts."""

import pytest

from ludic.errors import ConfigError, DataError
from ludic.rollouts.training import Sample, SampleStatus
from ludic.training.rollouts import group_filters as filters
from ludic.training.rollouts.group_filters import name_of_filter, of_rollouts
from ludic.types import Rollout, Step, TokenTrace


def group(rewards, responses=None, lengths=None, status=SampleStatus.COMPLETED):
    responses = responses or [str(i) for i in range(len(rewards))]
    lengths = lengths or [1] * len(rewards)
    columns = zip(rewards, responses, lengths, strict=True)
    return [
        Sample("p", response=response, tokens=[7] * length, reward=reward, status=status) for reward, response, length in columns
    ]


@pytest.mark.parametrize(
    ("check", "samples", "kept"),
    [
        (filters.check_reward_nonzero_std, group([0, 1]), True),
        (filters.check_reward_nonzero_std, group([0.1, 0.1, 0.1]), False),
        (filters.check_reward_nonzero_std, group([1]), False),
        (filters.check_min_reward, group([0, 0.5]), False),  # 0.5 is not above 0.5
        (filters.check_min_reward, group([0, 0.6]), True),
        (filters.make_threshold_filter(2), group([0, 3]), True),
        (filters.make_threshold_filter(2), group([0, 2]), False),
        (filters.check_response_diversity, group([0] * 4, list("aabb")), True),  # 2 of 4
        (filters.check_response_diversity, group([0] * 4, list("aaaa")), False),
        (filters.check_reasonable_length, group([0, 0], lengths=[5, 15]), True),  # mean 10
        (filters.check_reasonable_length, group([0, 0], lengths=[5, 14]), False),
        (filters.make_length_filter(1, 3), group([0, 0], lengths=[1, 5]), True),
        (filters.make_length_filter(1, 3), group([0, 0], lengths=[2, 5]), False),
        (filters.check_any_success, group([0]), True),
        (filters.check_any_success, group([0], status=SampleStatus.TRUNCATED), False),
        (filters.check_quality_and_diversity, group([0, 1], ["a", "b"]), True),
        (filters.check_quality_and_diversity, group([0, 1, 1], ["a"] * 3), False),
        (filters.check_quality_and_diversity, group([1, 1], ["a", "b"]), False),
    ],
)
def test_a_filter_keeps_what_its_rule_says(check, samples, kept):
    assert check(samples) is kept


@pytest.mark.parametrize(
    "name", [name for name, value in vars(filters).items() if name.startswith("check_") and value.__module__ == filters.__name__]
)
def test_no_filter_judges_an_empty_group(name):
    with pytest.raises(DataError, match="given none"):
        getattr(filters, name)([])


def test_a_filter_says_what_it_cannot_judge():
    with pytest.raises(DataError, match="sample 1 of the group is nan"):
        filters.check_reward_nonzero_std(group([0, float("nan")]))
    with pytest.raises(ConfigError, match=r"min_unique_ratio \(2\) must be at least 0 and at most 1"):
        filters.check_response_diversity(group([0]), min_unique_ratio=2)
    with pytest.raises(ConfigError, match="no group has such a length"):
        filters.make_length_filter(5, 4)


TRACE = TokenTrace([1, 2], [3])


def rollout(reward, action="4", terminated=True, trace=TRACE):
    return Rollout(steps=[Step(0, "2+2=", action, None, reward, not terminated, terminated, trace=trace)])


def test_filters_judge_rollouts():
    assert of_rollouts(filters.check_reward_nonzero_std)([rollout(0), rollout(1)])
    assert not of_rollouts(filters.check_response_diversity)([rollout(0, "4")] * 3)
    assert of_rollouts(filters.make_length_filter(3, 3))([rollout(0)])
    assert of_rollouts(filters.check_any_success)([rollout(0)])
    assert not of_rollouts(filters.check_any_success)([rollout(0, terminated=False)])
    with pytest.raises(DataError, match="for_rl"):
        of_rollouts(filters.check_reasonable_length)([rollout(0, trace=None)])


def test_a_filter_is_counted_under_its_name():
    assert name_of_filter(of_rollouts(filters.check_any_success)) == "check_any_success"
    assert name_of_filter(filters.make_length_filter(1, 3)) == "check_reasonable_length(1, 3)"
