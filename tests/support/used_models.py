"""Sharded models that made a pass before their optimizer: the largest difference of their weights
after a step on two ranks from those of one process, and how far the step moves the embedding."""

import asyncio
from dataclasses import replace

import numpy as np
import torch
from forked_ranks import run_ranks
from small_architectures import make_architecture
from training_samples import cpu_config, sorting_items, tiny_model

from ludic.models.byte_tokenizer import VOCAB_SIZE
from ludic.models.sharding import ShardingSettings, gather_tensor, make_mesh, shard_model
from ludic.training import make_sft
from ludic.training.algorithm import forward_logits
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.rank_plans import RankShare

EMBEDDING = "model.embed_tokens.weight"
KINDS = {"scored": lambda: tiny_model(0), "routed": lambda: make_architecture("mixtral", vocab_size=VOCAB_SIZE)}


def step(kind, share, *, sharded):
    """Name -> a weight after a step, or for `share` None before it."""
    torch.manual_seed(0)
    model = KINDS[kind]()
    if sharded:
        settings = ShardingSettings("full")
        shard_model(model, settings, make_mesh(settings, "cpu"))
    cfg = cpu_config(router_aux_coef=0.1 if kind == "routed" else 0.0, lr=1e-2)
    if kind == "scored":
        with torch.no_grad():
            forward_logits(model, {"input_ids": torch.ones(1, 2, dtype=torch.long), "attention_mask": torch.ones(1, 2)})
    backend = TorchBackend(model, cfg, algo=make_sft(), optimizer_factory=lambda: make_sgd(model))
    if share is not None:
        macro = MacroBatch.ingest(sorting_items(12, seed=3), cfg.max_seq_len)
        batch = MiniBatch(replace(macro, share=share), np.arange(len(macro.items)), cfg)
        asyncio.run(run(backend, batch))
    return {name: gather_tensor(value.detach()).clone() for name, value in model.named_parameters()}


def make_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


async def run(backend, batch):
    await backend.forward_backward(batch, totals=batch.totals).result()
    await backend.optim_step().result()


def compare(rank, world, kind, whole):
    own = step(kind, RankShare.of_this_rank(), sharded=True)
    return max(float((own[name] - value).abs().max()) for name, value in whole.items())


def find_used(runs):
    found = {}
    for kind in KINDS:
        before, whole = step(kind, None, sharded=False), step(kind, RankShare(0, 1), sharded=False)
        moved = float((whole[EMBEDDING] - before[EMBEDDING]).abs().max())
        found[kind] = {"moved": moved, "difference": max(run_ranks(2, compare, kind, whole))}
    return found
