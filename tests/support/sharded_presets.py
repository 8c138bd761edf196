"""The gradient of every preset on sharded ranks, and that of one process."""

import asyncio
import inspect
from dataclasses import replace

import numpy as np
from forked_ranks import run_ranks
from preference_samples import dpo_config, reward_model, rm_config, sorted_pairs, with_reference
from training_samples import cpu_config, sorting_items, tiny_model

from ludic.models.sharding import ShardingSettings, gather_tensor, make_mesh, shard_model
from ludic.training import presets, ranks
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.pair_batches import PreferenceMacroBatch, PreferenceMiniBatch
from ludic.training.batching.rank_plans import RankShare
from ludic.training.loss.base import adapted_loss
from ludic.training.types import SAWBatch

SETTINGS = {"group_size": 4, "max_completion_tokens": 9}


def make_batch(name, share):
    """(algorithm, config, mini-batch of this rank) of a preset."""
    preset = presets.PRESETS[name]
    accepted = inspect.signature(preset.make).parameters
    algo = preset.make(**{key: value for key, value in SETTINGS.items() if key in accepted})
    if preset.kind == "reward_model":
        cfg = rm_config(micro_token_budget=70)
        macro = PreferenceMacroBatch.ingest_pairs(sorted_pairs(15, seed=3), cfg.max_seq_len)
        return algo, cfg, PreferenceMiniBatch(replace(macro, share=share), np.arange(len(macro.items)), cfg)
    if preset.kind == "preference":
        cfg = dpo_config(micro_token_budget=70)
        macro = with_reference(PreferenceMacroBatch.ingest_pairs(sorted_pairs(15, seed=3), cfg.max_seq_len))
        macro = replace(macro, sample_columns={"kl": np.full(len(macro.items), 0.25)})
        return algo, cfg, PreferenceMiniBatch(replace(macro, share=share), np.arange(len(macro.items)), cfg)
    cfg = cpu_config(micro_token_budget=60)
    items = sorting_items(40, seed=3)
    if algo.preprocess is not None:
        items = algo.preprocess(SAWBatch(items)).items
    macro = MacroBatch.ingest(items, cfg.max_seq_len)
    skips = adapted_loss(algo).zero_weight_is_zero_gradient
    return algo, cfg, MiniBatch(replace(macro, share=share), np.arange(len(macro.items)), cfg, skip_zero_weight=skips)


def compute_gradient(model, name, share):
    """Name of a parameter -> its whole gradient, of all ranks together."""
    algo, cfg, batch = make_batch(name, share)
    model.zero_grad(set_to_none=True)
    backend = TorchBackend(model, cfg, algo=algo)
    asyncio.run(_run(backend, batch))
    return {key: gather_tensor(value.grad) for key, value in model.named_parameters() if value.grad is not None}


async def _run(backend, batch):
    await backend.forward_backward(batch, totals=batch.totals).result()


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
GROUPS = {"2": (2, 1), "4": (4, 1), "2, of rows": (2, 2), "4, of rows": (4, 4)}
"""(ranks, how many of them compute the same rows)."""


def make_model(name):
    return reward_model(**HEADS) if presets.PRESETS[name].kind == "reward_model" else tiny_model(**HEADS)


def compare_with(rank, world, expected, size):
    """Preset -> [largest gradient of one process, largest difference of the sharded ranks]."""
    ranks.split_context(size)
    settings = ShardingSettings("full")
    found = {}
    for name, whole in expected.items():
        model = shard_model(make_model(name), settings, make_mesh(settings, "cpu"))
        got = compute_gradient(model, name, RankShare.of_this_rank())
        assert got.keys() == whole.keys()
        largest = max(float(each.abs().max()) for each in whole.values())
        found[name] = [largest, max(float((got[key] - each).abs().max()) for key, each in whole.items())]
    return found


def find_presets(runs):
    expected = {name: compute_gradient(make_model(name), name, RankShare(0, 1)) for name in presets.PRESETS}
    return {group: run_ranks(world, compare_with, expected, size)[0] for group, (world, size) in GROUPS.items()}
