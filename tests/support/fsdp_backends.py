"""`FSDPTrainingBackend` on two ranks against one process: `python fsdp_backends.py OUT`. The ranks
are forks of this process, which writes what it found as JSON."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import torch
from document_samples import generate, make_samples
from forked_ranks import run_ranks
from training_samples import tiny_model

from ludic.models.sharding import gather_tensor
from ludic.rollouts.training import AsyncRolloutManager, DataBuffer, RLTrainingConfig, RolloutConfig, SFTTrainingConfig
from ludic.rollouts.training.backends.fsdp import FSDPConfig, FSDPTrainingBackend
from ludic.rollouts.training.backends.pytorch import PyTorchTrainingBackend
from ludic.rollouts.training.loops import run_rl_training, run_sft_training
from ludic.rollouts.training.loops.sft_loop import prepare_sft_batch
from ludic.rollouts.training.rl_losses import grpo_loss, sft_loss

SAMPLES = make_samples(8)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def sharded(folder, loss_fn=sft_loss, strategy="FULL_SHARD", **options):
    config = FSDPConfig(sharding_strategy=strategy, mixed_precision=False, clip_grad=None)
    return FSDPTrainingBackend(tiny_model(), sgd, loss_fn, folder, config, **options)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def whole(folder, loss_fn=sft_loss):
    model = tiny_model()
    return PyTorchTrainingBackend(model, sgd(model), loss_fn, folder, in_thread=False)


def weights_of(backend):
    return {name: gather_tensor(value.detach()) for name, value in backend.model.named_parameters()}


def difference(weights, expected):
    return max(float((weights[name] - expected[name]).abs().max()) for name in expected)


async def steps(backend, rank, world, count, first=0):
    """Losses of steps on this rank's rows of each batch of four, and gradient norms: those of
    `forward_backward`, those of `optim_step`."""
    losses, norms = [], ([], [])
    for step in range(first, first + count):
        rows = SAMPLES[4 * (step % 2) :][:4][rank * 4 // world : (rank + 1) * 4 // world]
        metrics = await backend.forward_backward(prepare_sft_batch(rows))
        losses.append(metrics["loss"])
        norms[0].append(metrics.get("grad_norm"))
        norms[1].append((await backend.optim_step())["grad_norm"])
    return losses, norms


def columns(rank, world, folder):
    """Batches by column: each strategy against one process."""

    async def run():
        found = {}
        expected = whole(Path(folder) / f"one{rank}")
        losses, norms = await steps(expected, 0, 1, 3)
        for strategy in STRATEGIES:
            backend = sharded(Path(folder) / strategy, strategy=strategy)
            own, own_norms = await steps(backend, rank, world, 3)
            weights = difference(weights_of(backend), weights_of(expected))
            found[strategy] = {"loss": max(abs(a - b) for a, b in zip(own, losses, strict=True)), "weights": weights}
            found[strategy]["norms"] = [own_norms, norms]
        return found

    return asyncio.run(run())


def save_on_two(rank, world, folder):
    async def run():
        backend = sharded(Path(folder) / "shared")
        await steps(backend, rank, world, 2)
        path = await backend.save_checkpoint(2, {"loss": 1.0})
        copied = await backend.get_weights()
        await backend.load_weights(copied)
        return [str(path), len(copied), backend.weight_version]

    return asyncio.run(run())


def go_on_alone(rank, world, folder, path):
    """One process goes on from the checkpoint of two, and saves."""

    async def run():
        backend, expected = whole(Path(folder) / "alone"), whole(Path(folder) / "expected")
        await backend.load_checkpoint(path)
        await steps(expected, 0, 1, 3)
        await steps(backend, 0, 1, 1, first=2)
        saved = await backend.save_checkpoint(3)
        return [difference(weights_of(backend), weights_of(expected)), str(saved), backend.current_step]

    return asyncio.run(run())


def go_on_on_two(rank, world, folder, path):
    async def run():
        backend = sharded(Path(folder) / "back", checkpoint_path=path)
        await steps(backend, rank, world, 1, first=3)
        expected = whole(Path(folder) / f"expected{rank}")
        await steps(expected, 0, 1, 4)
        return [difference(weights_of(backend), weights_of(expected)), backend.current_step]

    return asyncio.run(run())


def loops(rank, world, folder):
    """Both loops; what prompts this rank was asked for, and what its engine loaded. Generation goes
    on while the ranks compute and sync."""
    seen, loaded = [], []

    class Engine:
        async def update_weights_from_checkpoint(self, checkpoint_path):
            assert list(Path(checkpoint_path).glob("model*.safetensors"))
            loaded.append(Path(checkpoint_path).name)
            return {"success": True}

    async def note(prompts, seeds):
        seen.extend(prompts)
        return await generate(prompts, seeds)

    async def train(backend):
        prompts = DataBuffer([f"question {number}" for number in range(6)])
        config = RolloutConfig(2, 2, over_sampling_factor=2.0, generate_fn=note, order="submission")
        manager = AsyncRolloutManager(prompts, config)
        return await run_rl_training(backend, prompts, manager, [Engine()], RLTrainingConfig(num_steps=3, sync_every=1))

    async def run():
        found = {}
        config = SFTTrainingConfig(num_steps=3, batch_size=4)
        for name, loop in (("rl", train), ("sft", lambda backend: run_sft_training(backend, SAMPLES, config))):
            loss_fn = grpo_loss if name == "rl" else sft_loss
            build = whole if world == 1 else sharded
            backend = build(Path(folder) / f"{name} {world}", loss_fn)
            metrics = await loop(backend)
            weights = {key: value.tolist() for key, value in weights_of(backend).items()}
            found[name] = {"loss": [line["loss"] for line in metrics], "weights": weights}
        return {**found, "seen": seen, "loaded": loaded}

    return asyncio.run(run())


def compare_loops(one, two):
    found = {}
    for name in ("rl", "sft"):
        pairs = [(torch.tensor(one[name]["weights"][key]), torch.tensor(value)) for key, value in two[name]["weights"].items()]
        losses = zip(one[name]["loss"], two[name]["loss"], strict=True)
        found[name] = {
            "weights": max(float((a - b).abs().max()) for a, b in pairs),
            "loss": max(abs(a - b) for a, b in losses),
        }
    return found


def main(out):
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(2, save_on_two, folder)
        alone = run_ranks(1, go_on_alone, folder, saved[0][0])[0]
        back = run_ranks(2, go_on_on_two, folder, alone[1])
        [one], two = run_ranks(1, loops, folder), run_ranks(2, loops, folder)
        found = {
            "columns": run_ranks(2, columns, folder)[0],
            "saved": saved,
            "alone": alone,
            "back": back[0],
            "loops": compare_loops(one, two[0]),
            **{name: [each[name] for each in (one, *two)] for name in ("seen", "loaded")},
        }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
