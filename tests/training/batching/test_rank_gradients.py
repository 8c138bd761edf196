"""The gradients of all ranks add up to that of one process, for every preset. The ranks are
simulated: each collates its part of the plan, and the gradients of all parts are summed."""

import asyncio
import inspect
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from preference_samples import dpo_config, reward_model, rm_config, sorted_pairs, with_reference
from training_samples import assert_same_tensors, cpu_config, dialogues, gradients_of, sorting_items, tiny_model

from ludic.training import presets
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.pair_batches import PreferenceMacroBatch, PreferenceMiniBatch
from ludic.training.batching.rank_plans import RankShare
from ludic.training.loss.base import adapted_loss
from ludic.training.types import SAWBatch

SETTINGS = {"group_size": 4, "max_completion_tokens": 9}


@cache
def policy():
    return tiny_model()


@cache
def scorer():
    return reward_model()


def algorithm(name):
    make = presets.PRESETS[name].make
    needed = inspect.signature(make).parameters
    return make(**{key: value for key, value in SETTINGS.items() if key in needed})


def parts_of(macro, world, make):
    """The micro-batches of all ranks, and the totals of one of them."""
    rows = np.arange(len(macro.items))
    mini_batches = [make(replace(macro, share=RankShare(rank, world)), rows) for rank in range(world)]
    assert {len(mini_batch) for mini_batch in mini_batches} == {len(mini_batches[0])}
    return [micro_batch for mini_batch in mini_batches for micro_batch in mini_batch], mini_batches[-1].totals


def gradient(model, algo, cfg, micro_batches, totals):
    model.zero_grad(set_to_none=True)
    backend = TorchBackend(model, cfg, algo=algo)
    result = asyncio.run(_result_of(backend, micro_batches, totals))
    return gradients_of(model), result.loss.item()


async def _result_of(backend, micro_batches, totals):
    return await backend.forward_backward(micro_batches, totals=totals).result()


def assert_sum_of_ranks(model, algo, cfg, macro, make):
    whole = make(macro, np.arange(len(macro.items)))
    expected, loss = gradient(model, algo, cfg, whole, whole.totals)
    largest = max(each.abs().max().item() for each in expected.values())
    assert largest > 1e-4
    for world in (2, 4):
        micro_batches, totals = parts_of(macro, world, make)
        assert totals == whole.totals
        got, got_loss = gradient(model, algo, cfg, micro_batches, totals)
        assert_same_tensors(got, expected, atol=1e-6 * max(1.0, largest))
        assert got_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)


POLICIES = [
    name for name, preset in presets.PRESETS.items() if preset.kind not in ("reward_model", "preference") and name != "dpo"
]


@pytest.mark.parametrize(("name", "packing"), [*((name, "optimal") for name in POLICIES), ("cispo", "padding_free")])
def test_the_gradient_of_a_policy_preset(name, packing):
    algo = algorithm(name)
    cfg = cpu_config(micro_token_budget=60, packing=packing)
    items = sorting_items(13, seed=3)
    if algo.preprocess is not None:
        items = algo.preprocess(SAWBatch(items)).items
    skips = adapted_loss(algo).zero_weight_is_zero_gradient
    macro = MacroBatch.ingest(items, cfg.max_seq_len)
    assert_sum_of_ranks(policy(), algo, cfg, macro, lambda batch, rows: MiniBatch(batch, rows, cfg, skip_zero_weight=skips))


def test_the_gradient_of_merged_turns():
    cfg = cpu_config(micro_token_budget=140, max_seq_len=70)
    macro = MacroBatch.ingest(dialogues((3, 1, 4, 2), seed=5), cfg.max_seq_len, merge_turns=True)
    assert_sum_of_ranks(policy(), algorithm("cispo"), cfg, macro, lambda batch, rows: MiniBatch(batch, rows, cfg))


@pytest.mark.parametrize("options", [{}, {"lambda_regularization": 0.1, "label_smoothing": 0.1}])
@pytest.mark.parametrize("name", [name for name, preset in presets.PRESETS.items() if preset.kind == "reward_model"])
def test_the_gradient_of_a_reward_model_preset(name, options):
    algo = presets.PRESETS[name].make(**options)
    cfg = rm_config(micro_token_budget=70)
    macro = PreferenceMacroBatch.ingest_pairs(sorted_pairs(9, seed=3), cfg.max_seq_len)
    assert_sum_of_ranks(scorer(), algo, cfg, macro, lambda batch, rows: PreferenceMiniBatch(batch, rows, cfg))


def test_the_gradient_of_dpo():
    cfg = dpo_config(micro_token_budget=70)
    macro = with_reference(PreferenceMacroBatch.ingest_pairs(sorted_pairs(9, seed=3), cfg.max_seq_len))
    assert_sum_of_ranks(policy(), algorithm("dpo"), cfg, macro, lambda batch, rows: PreferenceMiniBatch(batch, rows, cfg))
