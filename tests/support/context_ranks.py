"""Loss and gradient of models whose rows several ranks compute together, and of one process."""

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
from forked_ranks import run_ranks
from policy_losses import LOSSES
from small_architectures import make_architecture
from training_samples import branching_items, cpu_config, sorting_items

from ludic.models.byte_tokenizer import VOCAB_SIZE
from ludic.models.sharding import ShardingSettings, enable_checkpointing, gather_tensor, make_mesh, shard_model
from ludic.training import LoraSettings, RLAlgorithm, apply_lora, ranks
from ludic.training.backend.torch import TorchBackend, sum_gradients
from ludic.training.batching.mini_batches import MacroBatch
from ludic.training.batching.rank_plans import RankShare
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.credit_assignment import ConstantCredit

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "mistral", "phi3", "gpt_neox", "deepseek_v3")
"""With windows of 8 tokens where they have windows; most with two key heads."""
LAYOUTS = {
    "padded": {"packing": "optimal", "logits": "full", "prefix_sharing": "off"},
    "concatenated": {"packing": "padding_free", "logits": "chunked", "prefix_sharing": "off"},
    "trees": {"packing": "padding_free", "logits": "chunked", "prefix_sharing": "tree"},
}
MODELS = {
    "whole": lambda: make_model("qwen2"),
    "recomputed": lambda: make_model("qwen2"),
    "lora": lambda: apply_lora(make_model("qwen2"), LoraSettings(rank=2)),
}
"""Other ways to train a model than a sharded one of each family."""
GROUPS = ((2, 2), (4, 4), (4, 2))
"""(ranks, how many of them compute a row)."""


def make_model(family):
    return make_architecture(family, vocab_size=VOCAB_SIZE).train()


def make_runs():
    """Name of a run -> (model, layout)."""
    runs = {f"{family}, padded": (partial(make_model, family), "padded") for family in FAMILIES}
    runs |= {f"{family}, concatenated": (partial(make_model, family), "concatenated") for family in FAMILIES}
    runs |= {f"{family}, trees": (partial(make_model, family), "trees") for family in ("qwen2", "gemma3_text")}
    return runs | {name: (make, "trees") for name, make in MODELS.items()}


def compute(name, make, layout, share, *, sharded):
    """(loss of all ranks, name of a parameter -> its whole gradient) of a run."""
    cfg = cpu_config(max_seq_len=48, micro_token_budget=96, **LAYOUTS[layout])
    algo = RLAlgorithm("test", ConstantCredit(1.0), LOSSES["composite_entropy"])
    items = branching_items([3, 2, 4], seed=3) if layout == "trees" else sorting_items(12, seed=3)
    model = make()
    if name == "recomputed":
        enable_checkpointing(model)
    if sharded and name != "whole":
        settings = ShardingSettings("full")
        model = shard_model(model, settings, make_mesh(settings, "cpu"))
    macro = replace(MacroBatch.ingest(items, cfg.max_seq_len), share=share)
    batch = TreeMiniBatch(macro, np.arange(len(macro.items)), cfg)
    assert batch.has_trees == (layout == "trees")
    backend = TorchBackend(model, cfg, algo=algo)
    assert backend.computes_trees or layout != "trees"
    assert backend.skips_logits == (cfg.logits == "chunked")
    result = asyncio.run(_run(backend, batch))
    [loss] = ranks.sum_over_ranks([float(result.loss)], "cpu")
    parameters = {key: value for key, value in model.named_parameters() if value.grad is not None}
    if name == "whole" and sharded:
        sum_gradients(parameters.values())
    return loss, {key: gather_tensor(value.grad) for key, value in parameters.items()}


async def _run(backend, batch):
    return await backend.forward_backward(batch, totals=batch.totals).result()


def compare_with(rank, world, expected, size):
    """Run -> [largest gradient of one process, largest difference, difference of the losses]."""
    ranks.split_context(size)
    found = {}
    for name, (make, layout) in make_runs().items():
        loss, whole = expected[name]
        own_loss, own = compute(name, make, layout, RankShare.of_this_rank(), sharded=True)
        assert own.keys() == whole.keys()
        largest = max(float(each.abs().max()) for each in whole.values())
        difference = max(float((own[key] - each).abs().max()) for key, each in whole.items())
        found[name] = [largest, difference, abs(own_loss - loss)]
    return found


def find_contexts(runs):
    expected = {name: compute(name, *each, RankShare(0, 1), sharded=False) for name, each in make_runs().items()}
    return {f"{size} of {world}": run_ranks(world, compare_with, expected, size)[0] for world, size in GROUPS}
