"""The facts about several batches together are those of one batch with all samples."""

from statistics import fmean, pstdev

import pytest
from hypothesis import given, strategies as st
from training_samples import sorting_items

from ludic.training.batching.shared_batches import join_batches
from ludic.training.types import SAWBatch

REWARDS = st.lists(st.floats(-10, 10), max_size=6)


def batch_of(rewards, lengths):
    """The facts that an engine gives of these rollouts, which have a sample each."""
    meta = {
        "target_rollouts": len(rewards),
        "num_samples": len(lengths),
        "num_failed_episodes": len(rewards) % 3,
        "generation_s": float(len(rewards)),
        "avg_total_reward": fmean(rewards) if rewards else 0.0,
        "reward_std": pstdev(rewards) if rewards else 0.0,
        "avg_completion_length": fmean(lengths) if lengths else 0.0,
        "source": "engine",
    }
    return SAWBatch(sorting_items(len(rewards)), meta)


@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_the_facts_are_those_of_all_samples(of_ranks):
    lengths = [[round(abs(reward)) for reward in rewards] for rewards in of_ranks]
    joined = join_batches([batch_of(*each) for each in zip(of_ranks, lengths, strict=True)])
    everything = [reward for rewards in of_ranks for reward in rewards]
    expected = batch_of(everything, [length for each in lengths for length in each]).meta
    expected |= {"num_failed_episodes": sum(len(each) % 3 for each in of_ranks), "generation_s": float(max(map(len, of_ranks)))}
    assert len(joined.items) == len(everything)
    assert joined.meta.keys() == expected.keys()
    for key, value in expected.items():
        assert joined.meta[key] == (value if key == "source" else pytest.approx(value, abs=1e-6)), key


def test_rewards_by_hand():
    # Rewards [1, 1, 1] and [0]: mean 3/4, variance (3 * (1/4)**2 + (3/4)**2) / 4 = 3/16.
    joined = join_batches([batch_of([1.0, 1.0, 1.0], [1, 1, 1]), batch_of([0.0], [5])])
    assert joined.meta["avg_total_reward"] == 0.75
    assert joined.meta["reward_std"] == pytest.approx((3 / 16) ** 0.5)
    assert joined.meta["avg_completion_length"] == 2.0


def test_rollouts_that_made_no_sample_count():
    """Rewards [1, 0, 1, 0], and [0, 0, 0, 0] in groups that a filter took out: the mean is 2 / 8,
    the deviation sqrt(1/4 - 1/16) = 0.433, and half of the groups have equal rewards."""
    some, none = batch_of([1.0, 0.0, 1.0, 0.0], [1, 1, 1, 1]), batch_of([0.0] * 4, [])
    none = SAWBatch([], {**none.meta, "frac_reward_zero_std": 1.0})
    some.meta["frac_reward_zero_std"] = 0.0
    meta = join_batches([some, none]).meta
    assert (meta["avg_total_reward"], meta["frac_reward_zero_std"], meta["avg_completion_length"]) == (0.25, 0.5, 1.0)
    assert meta["reward_std"] == pytest.approx(0.4330127)


def test_a_mean_that_a_batch_lacks_is_left_out():
    partial = SAWBatch(sorting_items(2), {"avg_total_reward": 1.0, "reward_std": 0.0, "epoch": 3})
    without = SAWBatch(sorting_items(2), {"epoch": 3})
    assert join_batches([partial, without]).meta == {"epoch": 3}
    assert join_batches([partial, SAWBatch([], {})]).meta == partial.meta


def test_facts_of_environments_are_joined_by_name() -> None:
    one = {"a": {"rewards": [1.0], "lengths": [3], "flat": [], "failed": 0}}
    two = {**one, "b": {"rewards": [], "lengths": [], "flat": [], "failed": 2}}
    joined = join_batches([SAWBatch([], {"environments": one}), SAWBatch([], {"environments": two}), SAWBatch([], {})])
    both = {"rewards": [1.0, 1.0], "lengths": [3, 3], "flat": [], "failed": 0}
    assert joined.meta["environments"] == {"a": both, "b": two["b"]}
