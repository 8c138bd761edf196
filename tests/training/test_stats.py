"""Statistics by hand."""

import json

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ludic import _core
from ludic.errors import ConfigError, DataError
from ludic.training import (
    Reducer,
    SAWBatch,
    SAWItem,
    aggregate_stats,
    apply_reducers_to_records,
    default_reducers,
)
from ludic.training.loggers.base import Percent
from ludic.training.stats import (
    check_reducers,
    combine_stats,
    entropy_stat,
    environment_stats,
    final_values,
    named_reward_stats,
    prefix_keys,
    reducer_stats,
)
from ludic.training.types import ActorTokenLogps, SampleAttachments


def item(**meta):
    return SAWItem([5, 6, 7], [1, 1, 1], [0, 1, 1], 1.0, meta)


def batch(*items, **meta):
    return SAWBatch(list(items), meta)


def test_no_micro_batches_give_no_statistics():
    assert aggregate_stats([], [batch(item())]) == {}


def test_means_are_weighted_by_samples():
    # (1 * 3 + 5 * 1) / 4 = 2
    stats = aggregate_stats([{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(5.0)}], [], micro_batch_sizes=[3, 1])
    assert stats["loss"] == 2.0


def test_without_sizes_micro_batches_have_equal_weight():
    assert aggregate_stats([{"loss": 1.0}, {"loss": 5.0}], [])["loss"] == 3.0


def test_a_missing_key_of_a_micro_batch_does_not_count_as_zero():
    # only the second has the key: 4, not (0 * 3 + 4 * 1) / 4 = 1
    stats = aggregate_stats([{"loss": 1.0}, {"loss": 1.0, "margin": 4.0}], [], micro_batch_sizes=[3, 1])
    assert stats["margin"] == 4.0


def test_gpu_peaks_are_maxima_and_counts_are_sums():
    micro = [{"gpu_mem_peak_mb": 7.0, "total_completion_tokens": 2}, {"gpu_mem_peak_mb": 3.0, "total_completion_tokens": 5}]
    stats = aggregate_stats(micro, [], micro_batch_sizes=[1, 9])
    assert stats["gpu_mem_peak_mb"] == 7.0
    assert stats["total_completion_tokens"] == 7.0


def test_python_floats_of_a_composite_loss_pass_through():
    stats = aggregate_stats([{"kl/weight": 0.5, "kl/loss": torch.tensor(2.0)}], [])
    assert stats["kl/weight"] == 0.5
    assert stats["kl/loss"] == 2.0


def test_a_wrong_number_of_sizes_is_refused():
    with pytest.raises(DataError, match=r"micro_batch_sizes \(1\)"):
        aggregate_stats([{}, {}], [], micro_batch_sizes=[1])


def test_entropy_is_the_mean_of_minus_log_p_over_the_sampled_tokens():
    """Of three tokens (1.0 + 3.0 + 4.0) / 3 = 8 / 3; the mean of the samples' means would be 3."""

    def sampled(logps):
        attachments = SampleAttachments(actor_logps=ActorTokenLogps(logps))
        return SAWItem([1, *range(len(logps))], [1] * (len(logps) + 1), [0] + [1] * len(logps), 1.0, {}, attachments)

    plain = SAWItem([5, 6], [1, 1], [0, 1], 1.0, {})
    found = entropy_stat([sampled([-1.0, -3.0]), sampled([-4.0]), plain])["entropy"]
    assert (found.value, found.weight) == (pytest.approx(8 / 3), 3.0)
    assert entropy_stat([sampled([-1.0, -3.0]), sampled([-2.0])])["entropy"].value == 2.0
    assert entropy_stat([plain]) == {}


def test_batch_statistics_are_means_over_samples():
    first = batch(item(total_reward=1.0, completion_length=4), item(total_reward=0.0, completion_length=2), target_rollouts=3)
    second = batch(item(total_reward=0.5, completion_length=3), target_rollouts=1, effective_rollouts=1)
    stats = aggregate_stats([{"loss": 0.0}], [first, second])
    assert stats["num_samples"] == 3
    assert stats["target_rollouts"] == 4
    assert stats["effective_rollouts"] == 4  # 3, the target, for the first sample, which has no value of its own
    assert stats["avg_total_reward"] == 0.5
    assert stats["avg_completion_length"] == 3.0


def test_older_names_of_target_rollouts_and_samples_without_lengths_are_supported():
    assert aggregate_stats([{}], [batch(item(), batch_size=5)])["target_rollouts"] == 5
    assert aggregate_stats([{}], [batch(item(), num_rollouts=6)])["target_rollouts"] == 6
    stats = aggregate_stats([{}], [batch(item(rollout_id="a"), item(rollout_id="a"), item(rollout_id="b"))])
    assert stats["target_rollouts"] == 2  # an offline batch: the rollouts that are in it
    assert stats["avg_completion_length"] == 2.0  # number of action tokens


def test_an_empty_batch_has_means_of_zero():
    stats = aggregate_stats([{"loss": 1.0}], [batch()])
    assert stats["avg_total_reward"] == 0.0
    assert stats["num_samples"] == 0


RECORDS = [
    {"passed": True, "score": 1.0, "nested": {"quality": 2.0}, "result": "win", "rollout_id": "a"},
    {"passed": False, "score": None, "nested": {}, "result": "loss", "rollout_id": "a"},
    {"passed": True, "score": 4.0, "result": "win", "rollout_id": "b"},
]


def reduce(reducer, **counts):
    return apply_reducers_to_records(RECORDS, {"x": reducer}, **counts)["x"]


def test_reducers_by_hand():
    assert reduce(Reducer("mean", "score")) == 2.5  # the None is skipped: (1 + 4) / 2
    assert reduce(Reducer("sum", "score")) == 5.0
    assert reduce(Reducer("count_true", "passed")) == 2
    assert reduce(Reducer("count_true", "passed", normalize_by="samples")) == pytest.approx(2 / 3)
    assert reduce(Reducer("mean", "nested.quality")) == 2.0
    assert reduce(Reducer("mean", "absent")) == 0.0


def test_transforms_and_functions_by_hand():
    assert reduce(Reducer("count_true", "result", transform=lambda v: v == "win")) == 2
    assert reduce(Reducer("mean", lambda record: record["score"])) == 2.5
    assert reduce(Reducer("sum", "score", transform=lambda v: 10 * v)) == 50.0
    assert reduce(Reducer("mean", "passed", transform=lambda v: None if v else 3.0)) == 3.0


def test_a_rate_by_rollouts_counts_rollouts_and_not_steps():
    # both steps of rollout a and the one of b are true for "result is there": 2 rollouts of 2, not
    # 3 of 2
    reducer = Reducer("count_true", "result", transform=bool, normalize_by="rollouts")
    assert reduce(reducer, rollout_count=2) == 1.0
    assert reduce(Reducer("count_true", "passed", normalize_by="rollouts"), rollout_count=4) == 0.5


def test_a_mean_with_a_denominator_is_divided_once():
    # sum 5 over 3 samples; an earlier version divided the mean 2.5 by 3 again
    for source in ("score", lambda record: record["score"]):
        assert reduce(Reducer("mean", source, normalize_by="samples")) == pytest.approx(5 / 3)


def test_a_denominator_of_zero_gives_zero():
    for source in ("score", lambda record: record["score"]):
        assert reduce(Reducer("sum", source, normalize_by="rollouts"), rollout_count=0) == 0.0
    assert reduce(Reducer("count_true", "passed", normalize_by="rollouts"), rollout_count=0) == 0.0


def test_unknown_kinds_and_denominators_are_refused_when_applied():
    with pytest.raises(ValueError, match=r"kind \(median\)"):
        reduce(Reducer("median", "score"))
    with pytest.raises(ConfigError, match="normalize_by"):
        reduce(Reducer("mean", "score", normalize_by="steps"))


def test_default_reducers():
    items = [
        item(finish_reason="length", seq_len_truncated=True),
        item(finish_reason="stop"),
        item(),
        item(finish_reason="length"),
    ]
    stats = aggregate_stats([{}], [batch(*items)], reducers=default_reducers())
    assert stats["completion_truncated_rate"] == 0.5
    assert stats["seq_len_truncated_rate"] == 0.25
    assert all(reducer.as_percent for reducer in default_reducers().values())


def test_a_percent_reducer_gives_a_fraction_that_is_displayed_in_percent():
    shares = reduce(Reducer("count_true", "passed", normalize_by="samples", as_percent=True))
    assert shares == pytest.approx(2 / 3)
    assert isinstance(shares, Percent)
    assert not isinstance(reduce(Reducer("mean", "score")), Percent)
    assert json.dumps(Percent(0.25)) == "0.25"


def test_rates_by_rollouts_are_computed_in_the_core(monkeypatch):
    asked = []
    original = _core.reduce_records
    monkeypatch.setattr(
        _core,
        "reduce_records",
        lambda records, paths, *counts: asked.extend(paths) or original(records, paths, *counts),
    )
    assert reduce(Reducer("count_true", "passed", normalize_by="rollouts"), rollout_count=4) == 0.5
    assert reduce(Reducer("count_true", lambda record: record["passed"], normalize_by="rollouts"), rollout_count=4) == 0.5
    assert [(kind, by) for kind, _, by in asked] == [("count_true", "rollouts")] * 2


def test_a_sample_without_a_reward_does_not_count_in_the_mean_reward():
    rewarded = batch(item(total_reward=1.0), item(total_reward=0.5), item())
    assert aggregate_stats([{}], [rewarded])["avg_total_reward"] == 0.75


@pytest.mark.parametrize("name", ["loss", "train/loss", "step", "avg_total_reward", "perf/step_s", "mismatch/max"])
def test_a_reducer_cannot_have_the_name_of_a_trainer_statistic(name):
    with pytest.raises(ConfigError, match=f"cannot be named '{name}'"):
        check_reducers({name: Reducer("mean", "score")})


def test_callable_sources_receive_the_sample_in_training():
    reducers = {"ids": Reducer("sum", lambda saw_item: len(saw_item.input_ids))}
    assert aggregate_stats([{}], [batch(item(), item())], reducers=reducers)["ids"] == 6


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["a", "b", "rollout_id"]),
            st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.just(float("nan"))),
        )
    ),
    st.sampled_from(["mean", "sum", "count_true"]),
    st.sampled_from([None, "samples", "rollouts"]),
)
def test_a_path_and_an_equivalent_function_reduce_equally(records, kind, normalize_by):
    counts = {"sample_count": 7, "rollout_count": 3}
    by_path = apply_reducers_to_records(records, {"x": Reducer(kind, "a", normalize_by=normalize_by)}, **counts)
    by_function = apply_reducers_to_records(
        records, {"x": Reducer(kind, lambda r: r.get("a"), normalize_by=normalize_by)}, **counts
    )
    assert by_path["x"] == pytest.approx(by_function["x"], nan_ok=True)


class Transfers(TorchDispatchMode):
    """Counts transfers of values to Python."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_all_statistics_are_transferred_at_once():
    micro = [{name: torch.tensor(float(k)) for name in "abcdef"} for k in range(5)]
    with Transfers() as transfers:
        aggregate_stats(micro, [batch(item())])
    assert transfers.count == 0  # .tolist() of the one stacked tensor copies memory; .item() would be counted


def test_keys_are_grouped_by_prefix():
    grouped = prefix_keys(
        {
            "loss": 1,
            "eval_loss": 2,
            "gpu_mem_alloc_mb": 3,
            "perf/x": 4,
            "phase": 5,
            "train_step": 6,
            "eval_step": 7,
            "cispo/loss": 8,
        }
    )
    assert grouped == {
        "train/loss": 1,
        "eval/loss": 2,
        "perf/gpu_mem_alloc_mb": 3,
        "perf/x": 4,
        "train/step": 6,
        "eval/step": 7,
        "train/cispo/loss": 8,
    }


def test_means_over_pairs_are_weighted_by_pairs():
    micro = [
        {
            "accuracy": torch.tensor(1.0),
            "margin": torch.tensor(0.5),
            "num_pairs": torch.tensor(1.0),
        },  # a pair and a single sample
        {"accuracy": torch.tensor(0.0), "margin": torch.tensor(-1.0), "num_pairs": torch.tensor(2.0)},
        {"accuracy": torch.tensor(0.0), "margin": torch.tensor(0.0), "num_pairs": torch.tensor(0.0)},  # single samples
    ]
    found = aggregate_stats(micro, [], micro_batch_sizes=[3, 4, 5])
    # (1 * 1 + 2 * 0 + 0) / 3, (1 * 0.5 + 2 * -1) / 3
    assert (found["accuracy"], found["margin"]) == pytest.approx((1 / 3, -0.5))
    alone = aggregate_stats(micro[2:], [], micro_batch_sizes=[5])
    assert (alone["accuracy"], alone["margin"]) == (0.0, 0.0)


def test_each_reward_function_has_a_mean_and_a_deviation_over_the_samples_where_it_applied():
    # short: 1, 0, 0 and a turn without it; exact applied once
    items = [item(**{"rewards/short": 1.0, "rewards/exact": 2.0}), item(**{"rewards/short": 0.0}), item(**{"rewards/short": 0})]
    assert final_values(named_reward_stats([*items, item(reward=1.0)])) == pytest.approx(
        {"rewards/short/mean": 1 / 3, "rewards/short/std": (2 / 9) ** 0.5, "rewards/exact/mean": 2.0, "rewards/exact/std": 0.0}
    )
    assert named_reward_stats([item(reward=1.0)]) == {}


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=6), st.lists(st.floats(-9, 9), min_size=1, max_size=6))
def test_rewards_of_two_ranks_have_the_deviation_of_all(left, right):
    parts = [named_reward_stats([item(**{"rewards/a": value}) for value in values]) for values in (left, right)]
    whole = named_reward_stats([item(**{"rewards/a": value}) for value in [*left, *right]])
    for key, stat in whole.items():
        assert combine_stats([part[key] for part in parts]).value == pytest.approx(stat.value, abs=1e-9)


def test_statistics_of_an_environment_are_worked_by_hand():
    """Rewards 1, 1 and 0, 1 of two groups, the first flat; all episodes of b failed."""
    facts = {"rewards": [1.0, 1.0, 0.0, 1.0], "lengths": [2, 4, 6], "flat": [True, False], "failed": 1}
    none = {"rewards": [], "lengths": [], "flat": [], "failed": 3}
    assert final_values(environment_stats({"environments": {"a": facts, "b": none}})) == {
        "a/played_rollouts": 4.0,
        "a/num_failed_episodes": 1.0,
        "a/avg_sampled_reward": 0.75,
        "a/reward_std": pytest.approx(0.1875**0.5),
        "a/frac_reward_zero_std": 0.5,
        "a/avg_completion_length": 4.0,
        "b/played_rollouts": 0.0,
        "b/num_failed_episodes": 3.0,
    }
    assert environment_stats({}) == {}


def test_a_reducer_of_an_environment_counts_its_own_samples_and_episodes():
    """Of a: two episodes, three samples, and one episode has the fact at one of its two steps."""
    metas = [("a", "r1", False), ("a", "r1", True), ("a", "r2", False), ("b", "r3", True)]
    items = [item(environment=name, rollout_id=rollout, won=won) for name, rollout, won in metas]
    by = {way: Reducer("count_true", "won", normalize_by=way, environment="a") for way in ("samples", "rollouts")}
    absent = {"absent": Reducer("mean", "won", environment="c")}
    assert final_values(reducer_stats(items, {**by, **absent}, 9)) == pytest.approx({"samples": 1 / 3, "rollouts": 0.5})
    with pytest.raises(ConfigError, match=r"environment \(c\) selects samples of a training step"):
        apply_reducers_to_records([{"won": True}], absent)
