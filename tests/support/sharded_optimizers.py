"""Optimizers by name on two sharded ranks: `python sharded_optimizers.py FOLDER NAME-KIND..`
writes the largest difference from one process, after two steps, a checkpoint, and two steps of new
objects, on each rank and in one process. KIND: plain, half (bfloat16) or lora."""

import asyncio
import json
import sys
from pathlib import Path

import torch
from forked_ranks import run_ranks
from sharded_presets import make_batch
from training_samples import cpu_config, tiny_model

from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.sharding import ShardingSettings, find_own_region, gather_tensor, is_sharded, make_mesh, make_shard, shard_model
from ludic.models.state_files import read_model, read_optimizer
from ludic.training.backend.precision import LossScale, MasterWeights
from ludic.training.backend.saving import write_weights
from ludic.training.backend.torch import TorchBackend, build_optimizer
from ludic.training.batching.rank_plans import RankShare


class Run:
    """A model and an optimizer that get the same gradients in every process."""

    def __init__(self, name, kind, *, seed=0, shard=False):
        self.model = tiny_model(seed, vocab_size=67)
        if kind == "lora":
            self.model = apply_lora(self.model, LoraSettings(rank=3))
        if kind == "half":
            self.model = self.model.bfloat16()
        if shard:
            settings = ShardingSettings("full")
            shard_model(self.model, settings, make_mesh(settings, "cpu"))
        self.optimizer = build_optimizer(self.model, cpu_config(optimizer=name, lr=1e-2, weight_decay=0.1))
        self.masters = MasterWeights(self.optimizer)

    def step(self, number):
        draw = torch.Generator().manual_seed(number)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                gradient = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
                own = tuple(slice(*bounds) for bounds in find_own_region(parameter))
                parameter.grad = make_shard(gradient[own].clone(), parameter)
        self.masters.move_gradients()
        self.optimizer.step()
        self.masters.write_back()
        self.masters.zero_grad()

    def load(self, folder):
        read_model(self.model, folder)
        read_optimizer(self.optimizer, self.model, folder)

    def weights(self):
        return {
            name: gather_tensor(value.detach()).float() for name, value in self.model.named_parameters() if value.requires_grad
        }


def go_on(run, folder, expected):
    """The largest difference after the last two of four steps."""
    run.load(folder)
    run.step(2), run.step(3)
    return max(float((value - expected[name]).abs().max()) for name, value in run.weights().items())


def on_ranks(rank, world, name, kind, folder, expected):
    run = Run(name, kind, shard=True)
    assert is_sharded(run.model)
    run.step(0), run.step(1)
    write_weights(run.model, run.optimizer, folder)
    torch.distributed.barrier()
    return go_on(Run(name, kind, seed=1 if kind != "lora" else 0, shard=True), folder, expected)


def scaled_steps(model, share, start):
    """[steps until one is not skipped, gradient norm of it] of a float16 model whose loss begins at
    the scale `start`."""
    LossScale.START = start
    algo, cfg, batch = make_batch("grpo", share)
    backend = TorchBackend(model, cfg, algo=algo)

    async def step():
        await backend.forward_backward(batch, totals=batch.totals).result()
        return await backend.optim_step().result()

    for number in range(40):
        stats = asyncio.run(step())
        if not stats["skipped_steps"]:
            return [number, stats["grad_norm"]]
    raise AssertionError("every step was skipped")


def scaled_ranks(rank, world):
    settings = ShardingSettings("full")
    model = shard_model(tiny_model().half(), settings, make_mesh(settings, "cpu"))
    return scaled_steps(model, RankShare(rank, world), 2.0**30)


def main(folder, cases):
    found = {}
    for case in cases:
        name, kind = case.split("-")
        place = folder / case
        place.mkdir()
        whole = Run(name, kind)
        for number in range(4):
            whole.step(number)
        expected = whole.weights()
        ranks = run_ranks(2, on_ranks, name, kind, place, expected)
        found[case] = [*ranks, go_on(Run(name, kind, seed=1 if kind != "lora" else 0), place, expected)]
    found["scale"] = [scaled_steps(tiny_model().half(), RankShare(0, 1), 1024.0), *run_ranks(2, scaled_ranks)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
