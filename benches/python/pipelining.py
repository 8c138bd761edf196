"""What a backend with a thread of its own gains, and how long it holds up the event loop:
`python -m benches.python.pipelining`.

First: steps of h seconds of host work and d seconds on the device, one after the other, and with
the host work of the next step done while the step runs. No order of work takes less than max(h, d)
a step; `reached` is the part of that gain which is had,
(sequential - pipelined) / (sequential - max(h, d)). All four times are measured, in turns; the
medians of the rounds are shown, and `reached` is that of the medians.

The device is a wait inside the forward pass, as a thread waits for a GPU, and what a small model
launches. The host waits, as for a server, or computes in Python.

Then (`--stalls`): a probe asks the event loop for 1 ms of sleep over and over while a step of
seconds computes on this processor, and a checkpoint is written. A stall is what it waited longer.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ludic.rollouts.training.backends.pytorch import PyTorchTrainingBackend
from ludic.rollouts.training.rl_losses import grpo_loss

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from training_samples import tiny_model

PROBE_S = 1e-3
Columns = dict[str, torch.Tensor]
Host = Callable[[], Awaitable[None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stalls", action="store_true", help="measure the event loop's stalls instead")
    parser.add_argument("--steps", type=int, default=3, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread\n")
    asyncio.run(report_stalls(args.rounds) if args.stalls else report_overlap(args.steps, args.rounds))


# ---- host work beside device work


@dataclass
class Times:
    """Seconds of `steps` steps."""

    host: float
    device: float
    sequential: float
    pipelined: float

    @property
    def reached(self) -> float:
        return (self.sequential - self.pipelined) / (self.sequential - max(self.host, self.device))


async def report_overlap(steps: int, rounds: int) -> None:
    print("| the host | h, ms | d, ms | sequential, ms | pipelined, ms | reached |\n|---|---|---|---|---|---|")
    for device_s, host_s in ((0.3, 0.1), (0.25, 0.25), (0.1, 0.3)):
        for kind in ("waits", "computes in Python"):
            host = waiting(host_s) if kind == "waits" else computing(host_s)
            backend = make_backend(device_s=device_s, num_hidden_layers=1)
            print_row(kind, await measure_rounds(backend, make_columns(1, 8), host, steps, rounds), steps)


def print_row(host: str, rounds: list[Times], steps: int) -> None:
    names = [each.name for each in fields(Times)]
    middle = Times(*[median(getattr(times, name) for times in rounds) for name in names])
    cells = " | ".join(f"{1e3 * getattr(middle, name) / steps:.1f}" for name in names)
    print(f"| {host} | {cells} | {middle.reached:.3f} |", flush=True)


async def measure_rounds(backend: PyTorchTrainingBackend, columns: Columns, host: Host, steps: int, rounds: int) -> list[Times]:
    await take_step(backend, columns)
    measured = [await measure_once(backend, columns, host, steps) for _ in range(rounds)]
    backend.close()
    return measured


async def measure_once(backend: PyTorchTrainingBackend, columns: Columns, host: Host, steps: int) -> Times:
    """The host alone, the device alone, both in turns, and both at once."""

    async def only_host() -> None:
        for _ in range(steps):
            await host()

    async def only_device() -> None:
        for _ in range(steps):
            await take_step(backend, columns)

    async def sequential() -> None:
        for _ in range(steps):
            await host()
            await take_step(backend, columns)

    async def pipelined() -> None:
        for _ in range(steps):  # the batch of the first step is there; the last host work is for the step after
            backend.forward_backward(columns)
            step = backend.optim_step()
            await host()
            await step

    return Times(*[await seconds_of(run) for run in (only_host, only_device, sequential, pipelined)])


async def seconds_of(run: Callable[[], Awaitable[None]]) -> float:
    start = time.perf_counter()
    await run()
    return time.perf_counter() - start


def waiting(seconds: float) -> Host:
    async def host() -> None:
        await asyncio.sleep(seconds)

    return host


def computing(seconds: float) -> Host:
    """A loop in Python that holds the interpreter for about `seconds`, always the same work."""
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < 0.2:
        _count()
        rounds += 1
    repeats = max(1, round(rounds * seconds / 0.2))

    async def host() -> None:
        for _ in range(repeats):
            _count()

    return host


def _count() -> int:
    return sum(number * number for number in range(1000))


# ---- stalls of the event loop


@dataclass
class Stalls:
    """How much longer than `PROBE_S` each sleep took."""

    seconds: float = 0.0
    each: list[float] = field(default_factory=list)


async def report_stalls(rounds: int) -> None:
    print("| while | seconds | longest stall, ms | 99 %, ms | full collections |\n|---|---|---|---|---|")
    wide = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
    models = {
        "few large layers": (make_backend(**wide), make_columns(8, 256)),
        "200 small layers": (make_backend(num_hidden_layers=200), make_columns(16, 100)),
    }
    for frozen in (False, True):
        if frozen:
            gc.collect()
            gc.freeze()
        suffix = ", gc.freeze()" if frozen else ""
        for _ in range(rounds):
            await print_stalls(f"nothing{suffix}", lambda: asyncio.sleep(2))
            for name, (backend, columns) in models.items():
                await print_stalls(f"a step, {name}{suffix}", lambda b=backend, c=columns: take_step(b, c))
                await print_stalls(f"a checkpoint, {name}{suffix}", lambda b=backend: b.save_checkpoint(1))
    for backend, _ in models.values():
        backend.close()


async def print_stalls(name: str, run: Callable[[], Awaitable[Any]]) -> None:
    before = gc.get_stats()[2]["collections"]
    stalls = await measure_stalls(run)
    ordered = sorted(stalls.each)
    numbers = f"{1e3 * ordered[-1]:.1f} | {1e3 * ordered[int(0.99 * len(ordered))]:.1f}"
    print(f"| {name} | {stalls.seconds:.2f} | {numbers} | {gc.get_stats()[2]['collections'] - before} |", flush=True)


async def measure_stalls(run: Callable[[], Awaitable[Any]]) -> Stalls:
    """The stalls of this loop while `run` is awaited."""
    stalls, done = Stalls(), asyncio.Event()

    async def probe() -> None:
        while not done.is_set():
            start = time.perf_counter()
            await asyncio.sleep(PROBE_S)
            stalls.each.append(time.perf_counter() - start - PROBE_S)

    task = asyncio.create_task(probe())
    await asyncio.sleep(0)
    stalls.seconds = await seconds_of(run)
    done.set()
    await task
    return stalls


# ---- the backend


def make_backend(*, device_s: float = 0.0, **model_settings: int) -> PyTorchTrainingBackend:
    """A Qwen2 with random weights. Its forward pass first waits `device_s`, without the
    interpreter, as a thread does that waits for a device."""
    model = tiny_model(**{"max_position_embeddings": 512, **model_settings})
    if device_s:
        model.register_forward_pre_hook(lambda *_: time.sleep(device_s))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return PyTorchTrainingBackend(model, optimizer, grpo_loss, tempfile.mkdtemp())


def make_columns(rows: int, length: int) -> Columns:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (rows, length), generator=generator)
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    columns["loss_mask"] = (torch.arange(length) >= 4).float().expand(rows, length).clone()
    return {**columns, "advantages": torch.randn(rows, generator=generator)}


async def take_step(backend: PyTorchTrainingBackend, columns: Columns) -> None:
    backend.forward_backward(columns)
    await backend.optim_step()


if __name__ == "__main__":
    main()
