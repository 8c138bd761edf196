"""Statistics of micro-batches combine to those of the whole batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from training_samples import ListSource, cpu_config, sorting_items, tiny_model

from ludic.training import RLAlgorithm, Trainer
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import EntropyBonus
from ludic.training.stats import Stat, combine_micro_stats, combine_stats, copy_to_host, final_values

values = st.floats(-1e3, 1e3, allow_nan=False)
parts_of_a_batch = st.lists(st.lists(values, min_size=1, max_size=6), min_size=1, max_size=6)


def measured(part, **more):
    return {"x_mean": float(np.mean(part)), "x_std": float(np.std(part)), **more}


@given(parts_of_a_batch)
def test_mean_and_standard_deviation_do_not_depend_on_the_split(parts):
    reduced = final_values(combine_micro_stats([measured(part) for part in parts], [len(part) for part in parts]))
    whole = np.concatenate(parts)
    assert reduced["x_mean"] == pytest.approx(whole.mean(), abs=1e-9)
    assert reduced["x_std"] == pytest.approx(whole.std(), abs=1e-6)


@given(parts_of_a_batch, st.sampled_from(["", "cispo/"]))
def test_means_over_tokens_are_weighted_by_tokens(parts, term):
    """Each part is one micro-batch whose tokens have these values. The number of its samples (1 or
    2) does not affect the weight."""
    sizes = [1 + index % 2 for index in range(len(parts))]
    micro = [
        {f"{term}clip_frac": float(np.mean(part)), f"{term}avg_action_tokens": len(part) / size}
        for part, size in zip(parts, sizes, strict=True)
    ]
    reduced = final_values(combine_micro_stats(micro, sizes))
    assert reduced[f"{term}clip_frac"] == pytest.approx(np.concatenate(parts).mean(), abs=1e-9)


def test_a_clip_fraction_by_hand():
    # 4 tokens of which 1 was clipped, in 4 samples, and 12 tokens of which 6 were, in 1 sample: 7
    # of 16, not (4 * .25 + .5) / 5 = .3
    micro = [{"clip_frac": 0.25, "avg_action_tokens": 1.0}, {"clip_frac": 0.5, "avg_action_tokens": 12.0}]
    assert final_values(combine_micro_stats(micro, [4, 1]))["clip_frac"] == 7 / 16
    # a sequence-level loss reports no token counts: 1 of 4 sequences, and 1 of 1
    assert final_values(combine_micro_stats([{"clip_frac": 0.25}, {"clip_frac": 1.0}], [4, 1]))["clip_frac"] == 0.4


@pytest.mark.parametrize("settings", [{}, {"normalizer": "samples"}, {"normalizer": "samples", "length_normalize": True}])
def test_the_entropy_of_the_bonus_does_not_depend_on_the_split(settings):
    def measured(budget):
        algo = RLAlgorithm("test", ConstantCredit(1.0), EntropyBonus(**settings))
        cfg = cpu_config(micro_token_budget=budget)
        trainer = Trainer(model=tiny_model(), algo=algo, batch_source=ListSource(sorting_items(12, seed=3)), cfg=cfg)
        return trainer.train_step_sync()

    whole, split = measured(4096), measured(32)
    assert split["train/entropy_mean"] == pytest.approx(whole["train/entropy_mean"], rel=1e-6)
    assert whole["train/entropy_mean"] == pytest.approx(-100 * whole["train/loss"], rel=1e-6)


def test_a_standard_deviation_without_its_mean_is_averaged():
    assert final_values(combine_micro_stats([{"x_std": 1.0}, {"x_std": 3.0}], [1, 1]))["x_std"] == 2.0


def test_a_statistic_reported_only_with_weight_zero_is_left_out():
    reduced = combine_micro_stats([{"ratio_mean": 0.0, "gpu_mem_peak_mb": 5.0}], [0])
    assert final_values(reduced) == {"gpu_mem_peak_mb": 5.0}
    beside = combine_micro_stats([{"ratio_mean": float("nan")}, {"ratio_mean": 1.5}], [0, 2])
    assert final_values(beside) == {"ratio_mean": 1.5}


def test_each_reduction_rule_by_hand():
    assert combine_stats([Stat(1.0, 3.0), Stat(5.0, 1.0)]) == Stat(2.0, 4.0)
    assert combine_stats([Stat(1.0, rule="sum"), Stat(5.0, rule="sum")]).value == 6.0
    assert combine_stats([Stat(1.0, rule="max"), Stat(5.0, rule="max")]).value == 5.0
    assert combine_stats([Stat(1.0, rule="min"), Stat(5.0, rule="min")]).value == 1.0
    # values 0, 2 (mean 1, std 1) and 4, 6: mean 3, variance (9 + 1 + 1 + 9) / 4 = 5
    assert combine_stats([Stat(1.0, 2.0, "std", 1.0), Stat(1.0, 2.0, "std", 5.0)]) == Stat(pytest.approx(5**0.5), 4.0, "std", 3.0)


def test_floats_and_tensors_are_moved_to_the_host_in_place():
    reduced = copy_to_host([{"a": torch.tensor(1.5), "b": 2}, {}, {"c": torch.tensor(3, dtype=torch.int64)}])
    assert reduced == [{"a": 1.5, "b": 2.0}, {}, {"c": 3.0}]
