"""Log-probabilities without logits on sharded heads, compared with all logits of one process:
`python sharded_heads.py OUT`. The ranks are forks of this process, which writes what it found as
JSON."""

import asyncio
import json
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from forked_ranks import run_ranks
from small_models import LLAMA, make_from_config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training_samples import cpu_config, sorting_items, tiny_model

from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.sharding import ShardingSettings, gather_tensor, make_mesh, shard_model
from ludic.training import RLAlgorithm
from ludic.training.backend import forward
from ludic.training.backend.forward import ModelPasses
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.rank_plans import RankShare
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import CompositeLoss, EntropyBonus, LossTerm, TokenClippedSurrogateLoss, token_scores

ALGO = RLAlgorithm(
    "test",
    ConstantCredit(1.0),
    CompositeLoss([LossTerm("pg", TokenClippedSurrogateLoss()), LossTerm("h", EntropyBonus(0.1))]),
)
TEMPERATURE = 0.7
CAPPED = {**LLAMA, "vocab_size": 259, "final_logit_softcapping": 2.0, "head_dim": 8}


def with_adapters_on_the_head():
    model = apply_lora(tiny_model(tie_word_embeddings=False), LoraSettings(rank=2, target_modules=["q_proj", "lm_head"]))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


MODELS = {
    "tied": tiny_model,
    "untied": partial(tiny_model, tie_word_embeddings=False),
    "soft cap": partial(make_from_config, "Gemma2", "ForCausalLM", CAPPED, 0),
    "bias": partial(
        make_from_config, "Phi", "ForCausalLM", {**LLAMA, "vocab_size": 259, "bos_token_id": 1, "eos_token_id": 2}, 0
    ),
    "adapters": with_adapters_on_the_head,
    "frozen head": lambda: freeze_head(tiny_model(tie_word_embeddings=False)),
}


def freeze_head(model):
    model.lm_head.requires_grad_(False)
    return model


def as_blocks(model):
    settings = ShardingSettings("full")
    return shard_model(model, settings, make_mesh(settings, "cpu"))


def as_one(model):
    """No blocks: only the hooks of the whole model sum gradients."""
    fully_shard(model)
    return model


def with_head_of_its_own(model):
    """The head is given up after its own forward pass."""
    fully_shard(model.lm_head, reshard_after_forward=True)
    return as_blocks(model)


def in_copies(model):
    settings = ShardingSettings("hybrid", shards=1)
    return shard_model(model, settings, make_mesh(settings, "cpu"))


FSDP = {
    "tied, blocks": ("tied", as_blocks),
    "tied, one": ("tied", as_one),
    "tied, copies": ("tied", in_copies),
    "untied, blocks": ("untied", as_blocks),
    "untied, head of its own": ("untied", with_head_of_its_own),
    "soft cap, blocks": ("soft cap", as_blocks),
    "bias, one": ("bias", as_one),
    "adapters, blocks": ("adapters", as_blocks),
    "adapters, one": ("adapters", as_one),
    "frozen head, head of its own": ("frozen head", with_head_of_its_own),
}


def cut_head(model, *, tied=False):
    """Tensor parallelism of the output layer, and of the embeddings that it shares."""
    mesh = init_device_mesh("cpu", (2,))
    plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    if tied:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


TENSOR_PARALLEL = {
    "tied": ("tied", partial(cut_head, tied=True)),
    "untied": ("untied", cut_head),
    "soft cap": ("soft cap", partial(cut_head, tied=True)),
    "bias": ("bias", cut_head),
    "frozen head": ("frozen head", cut_head),
}


def cut_along_the_width(model):
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"lm_head": RowwiseParallel(input_layouts=Replicate())})
    return model


def cut_with_adapters(model):
    cut_head(model)
    return apply_lora(model, LoraSettings(rank=2, target_modules=["lm_head"]))


def cut_twice(model):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("one", "other"))
    weight = distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0), Shard(0)])
    model.lm_head.weight = nn.Parameter(weight)
    return model


REFUSED = {"along the width": cut_along_the_width, "with adapters": cut_with_adapters, "over two dimensions": cut_twice}


def make_batch(cfg, share):
    macro = MacroBatch.ingest(sorting_items(12, seed=3), cfg.max_seq_len)
    return MiniBatch(replace(macro, share=share), np.arange(12), cfg)


def compute(model, path, share):
    """Gradients and log-probabilities of two passes: the second finds what the first left. Whether
    no logits were computed."""
    cfg = cpu_config(micro_token_budget=60, logits=path, temperature=TEMPERATURE)
    batch = make_batch(cfg, share)
    backend = TorchBackend(model, cfg, algo=ALGO)
    sizes, skips = [], backend.skips_logits
    hook = model.get_output_embeddings().register_forward_hook(lambda _, __, output: sizes.append(output.numel()))
    logps = []
    for _ in range(2):
        backend.reset().wait()
        asyncio.run(_run(backend, batch))
        gradients = {name: gather_tensor(value.grad) for name, value in model.named_parameters() if value.grad is not None}
        logps += [float(backend.forward_logprobs(micro, actions_only=True).wait().double().sum()) for micro in batch]
    hook.remove()
    assert len(batch) > 1
    assert (set(sizes) == {0}) == (path == "chunked")
    return gradients, logps, skips


async def _run(backend, batch):
    await backend.forward_backward(batch, totals=batch.totals).result()


def compare(model, name, want, share):
    """Whether no logits were computed, the largest gradient and difference, and the sum of
    log-probabilities."""
    got, logps, skips = compute(model, "chunked", share)
    assert got.keys() == want.keys(), (name, got.keys() ^ want.keys())
    return {
        "skips": skips,
        "largest": max(float(each.abs().max()) for each in want.values()),
        "gradients": max(float((got[key] - each).abs().max()) for key, each in want.items()),
        "logps": logps,
    }


def find_fsdp(rank, world, expected):
    """Each rank has its share of the batch."""
    return {
        case: compare(change(MODELS[name]()), name, expected[name], RankShare(rank, world))
        for case, (name, change) in FSDP.items()
    }


def count_outputs(model, tokens):
    model.get_output_embeddings().register_forward_hook(lambda _, __, output: tokens.append(output.shape[:2].numel()))


def find_tensor_parallel(rank, world, expected):
    """All ranks have the whole batch, and each some columns of the head."""
    found = {}
    for case, (name, change) in TENSOR_PARALLEL.items():
        model = change(MODELS[name]())
        cfg = cpu_config(micro_token_budget=60, logits="chunked", temperature=TEMPERATURE)
        logps, tokens = [], []
        count_outputs(model, tokens)
        passes = ModelPasses(model, cfg)
        skips = passes.skips_logits
        batch = make_batch(cfg, RankShare(0, 1))
        tokens.clear()
        for micro in batch:
            loss, _ = ALGO.compute_loss(model, micro.tensors, totals=batch.totals, chunked_logits=True, temperature=TEMPERATURE)
            loss.backward()
            logps.append(float(passes.forward_logprobs(micro, actions_only=True).wait().double().sum()))
        assert set(tokens) == {1}  # one, that nothing reads
        got = {key: gather_tensor(value.grad) for key, value in model.named_parameters() if value.grad is not None}
        want = expected[name]
        assert got.keys() == want.keys(), (name, got.keys() ^ want.keys())
        found[case] = {
            "skips": skips,
            "local": len(model.lm_head.weight.to_local()),
            "largest": max(float(each.abs().max()) for each in want.values()),
            "gradients": max(float((got[key] - each).abs().max()) for key, each in want.items()),
            "logps": logps,
        }
    return found


def find_refusals(rank, world):
    """The warnings of heads that are cut in another way."""
    found, warnings = {}, []
    forward._warn = warnings.append
    for case, change in REFUSED.items():
        warnings.clear()
        skips = ModelPasses(change(tiny_model(tie_word_embeddings=False)), cpu_config(logits="chunked")).skips_logits
        found[case] = {"skips": skips, "warnings": list(warnings)}
    return found


def main(out):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    token_scores.TILE_ELEMENTS = 1  # tiles of 64 columns
    whole = {name: compute(make(), "full", RankShare(0, 1)) for name, make in MODELS.items()}
    assert not any(skips for _, _, skips in whole.values())
    gradients = {name: found[0] for name, found in whole.items()}
    found = {
        "logps": {name: found[1] for name, found in whole.items()},
        "fsdp": run_ranks(2, find_fsdp, gradients),
        "tensor parallel": run_ranks(2, find_tensor_parallel, gradients),
        "refused": run_ranks(2, find_refusals),
    }
    Path(out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
