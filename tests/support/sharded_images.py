"""Samples with images on two ranks against one process: `python sharded_images.py` prints what it
found as JSON. In `all` both ranks share one batch of padded rows; in `one` rank 1 has text alone,
and both compute trees."""

import json
from dataclasses import replace

import numpy as np
import torch
from forked_ranks import run_ranks
from image_items import add_pictures, image_groups, image_item
from tiny_vision import make_tiny_vision
from torch.nn.parallel import DistributedDataParallel
from training_samples import cpu_config

from ludic.errors import ConfigError
from ludic.models.images.features import set_trained_parts
from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.sharding import ShardingSettings, gather_tensor, make_mesh, shard_model
from ludic.models.wrappers import unwrap_model
from ludic.training import RLAlgorithm
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.rank_plans import RankShare
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import TokenClippedSurrogateLoss

ALGORITHM = RLAlgorithm("test", ConstantCredit(1.0), TokenClippedSurrogateLoss(ratio_clip=10.0))
SIZES = [(16, 24), (16, 24), (24, 16)]
ONE_IMAGE = 24
CASES = [
    (kind, tower, who, budget)
    for kind in ("replicas", "full")
    for tower in ("trained", "projector", "frozen", "lora")
    for who in ("all", "one")
    for budget in ((None, ONE_IMAGE) if tower == "trained" else (None,))
] + [("wrapped", "frozen", who, None) for who in ("all", "one")]


def make_case(tower):
    """(model, samples with images, samples of text)."""
    model, processor = make_tiny_vision("qwen2_vl")
    set_trained_parts(model, "frozen" if tower == "lora" else tower)
    if tower == "lora":
        torch.manual_seed(0)
        model = apply_lora(model, LoraSettings(rank=2))
    pictured = [item for item, _ in image_groups(processor, add_pictures(processor, SIZES), size=4)]
    text = [image_item(processor, ["nothing to see"], [97 + n, 98], index=50 + n, weight=0.5 * n - 1)[0] for n in range(4)]
    return model, pictured, text


def make_backend(model, budget, **options):
    cfg = cpu_config(max_seq_len=64, skip_zero_weight=False, max_grad_norm=None, image_patch_budget=budget, **options)
    return TorchBackend(model, cfg, algo=ALGORITHM, optimizer_factory=lambda: torch.optim.SGD(model.parameters(), lr=0.03))


def make_mini_batch(backend, items, share=None):
    macro = MacroBatch.ingest(items, backend.cfg.max_seq_len)
    kind = TreeMiniBatch if backend.shares_prefixes else MiniBatch
    return kind(macro if share is None else replace(macro, share=share), np.arange(len(macro.items)), backend.cfg)


def wrap(model, kind):
    if kind == "full":
        settings = ShardingSettings("full")
        return shard_model(model, settings, make_mesh(settings, "cpu"))
    return DistributedDataParallel(model) if kind == "wrapped" else model


def take_steps(tower, who, budget, rank=0, world=1, kind="replicas"):
    """(weights after two steps, log-probabilities of the first micro-batch before them, images that
    the tower computed in each)."""
    model, pictured, text = make_case(tower)
    model = wrap(model, kind)
    options = {
        "all": {"packing": "optimal", "prefix_sharing": "off", "micro_token_budget": 70},
        "one": {"prefix_sharing": "tree"},
    }
    backend = make_backend(model, budget, **options[who])
    assert backend.shares_prefixes == (who == "one")
    if who == "all":
        batch = make_mini_batch(backend, [*pictured, *text], RankShare(rank, world))
        totals = batch.totals
    else:
        totals = make_mini_batch(backend, [*pictured, *text], RankShare(0, 1)).totals  # of both ranks together
        batch = make_mini_batch(backend, [[*pictured, *text], pictured, text][rank + (world > 1)])
    logps = [float(backend.forward_logprobs(micro).wait().sum()) for micro in batch][:1]
    encoded = []
    for _ in range(2):
        result = backend.forward_backward(batch, totals=totals).wait()
        encoded.append(result.images.get("images/encoded"))
        backend.optim_step().wait()
    weights = {name: gather_tensor(value.detach()).clone() for name, value in unwrap_model(model).named_parameters()}
    return weights, logps, encoded


def compare(rank, world, expected):
    found = []
    for (kind, tower, who, budget), (weights, _, _) in zip(CASES, expected, strict=True):
        got, logps, encoded = take_steps(tower, who, budget, rank, world, kind)
        assert got.keys() == weights.keys()
        worst = max(float((got[name] - each).abs().max()) for name, each in weights.items())
        found.append({"worst": worst, "logps": logps, "encoded": encoded})
    try:
        take_steps("trained", "one", None, rank, world, "wrapped")
    except ConfigError as error:
        found.append({"refused": str(error)})
    return found


def main():
    expected = [take_steps(tower, who, budget) for _, tower, who, budget in CASES]
    begun = [dict(make_case(tower)[0].named_parameters()) for _, tower, _, _ in CASES]
    moved = [
        max(float((after[name] - each).detach().abs().max()) for name, each in before.items() if "visual" in name)
        for before, (after, _, _) in zip(begun, expected, strict=True)
    ]
    two = run_ranks(2, compare, expected)
    refused = [each.pop() for each in two]
    cases = [
        {"case": case, "moved": far, "alone": [logps, encoded], "ranks": [first, second]}
        for case, far, (_, logps, encoded), first, second in zip(CASES, moved, expected, *two, strict=True)
    ]
    print(json.dumps({"cases": cases, "refused": refused}))


if __name__ == "__main__":
    main()
