"""Over-sampling on a real vLLM server: `python -m benches.python.over_sampling --vllm`.

A server of a tiny model runs on this CPU (`LUDIC_VLLM_PYTHON`). Members are sampled by `/v1/
completions` through `AsyncRolloutManager`, each with a number of tokens from lognormal(0, 1) times
`MEDIAN_TOKENS`, at most the context; no training. All rows have the same prompts, seeds and
lengths, and fit into the server's slots (64), so that a request costs the server's time for a step
and not a place in a queue. The rows are measured in turns.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx2

GROUPS, MEMBERS = 8, 4
MEDIAN_TOKENS, MOST_TOKENS = 30, 480
SERVED_ROWS = [(1.0, 0), (1.5, 1)]


def tokens_of(seed: int) -> int:
    """The length of an answer."""
    return min(MOST_TOKENS, max(1, round(MEDIAN_TOKENS * math.exp(random.Random(seed).gauss(0, 1)))))


def generate_from(client: Any) -> Any:
    """A `generate_fn` of the server's answers, as docs/rollouts.md has it."""
    from ludic.rollouts.training import Sample

    async def generate(prompts: Sequence[str], seeds: Sequence[int]) -> list[Any]:
        (prompt,), (seed,) = prompts, seeds
        ids = list(prompt.encode())
        extra = {"return_token_ids": True, "ignore_eos": True}
        answer = await client.completions.create(
            model="tiny", prompt=ids, seed=seed, max_tokens=tokens_of(seed), logprobs=0, extra_body=extra
        )
        (choice,) = answer.choices
        zeros = [0.0] * len(ids)
        masks = {"loss_mask": zeros + [1.0] * len(choice.token_ids), "rollout_log_probs": zeros + choice.logprobs.token_logprobs}
        return [Sample(prompt, choice.text, ids + choice.token_ids, **masks, reward=1.0)]

    return generate


def make_manager(client: Any, factor: float, max_lag: int, **settings: Any) -> Any:
    from ludic.rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig

    own = {"batch_size": GROUPS, "n_samples_per_prompt": MEMBERS, "over_sampling_factor": factor, "max_lag": max_lag}
    config = RolloutConfig(**{**own, "generate_fn": generate_from(client), **settings})
    return AsyncRolloutManager(DataBuffer([f"{n}+1=" for n in range(100)]), config)


def make_client(url: str) -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0)


async def time_batches(url: str, factor: float, max_lag: int, batches: int) -> tuple[float, int, int]:
    """(seconds, answered tokens, largest lag) of so many batches after the first, each of whole
    groups."""
    async with make_client(url) as client, make_manager(client, factor, max_lag) as manager:
        manager.limit(batches + 1)
        await manager.generate_batch()
        begun, tokens, lag = time.perf_counter(), 0, 0
        for _ in range(batches):
            batch = await manager.generate_batch()
            assert len(batch.tokens) == GROUPS * MEMBERS
            tokens += sum(batch.response_lengths)
            lag = max(lag, *batch.metadata["lags"])
        return time.perf_counter() - begun, tokens, lag


async def time_abort(url: str) -> tuple[float, float, float]:
    """(requests that ran, seconds until `generate_batch` has returned, seconds until none runs)."""
    async with make_client(url) as client:
        manager = make_manager(client, 1.0, 0, generate_fn=generate_long(client))
        waiting = asyncio.create_task(manager.generate_batch())
        while (running := await asyncio.to_thread(read_metric, url, "vllm:num_requests_running")) < GROUPS * MEMBERS:
            assert not waiting.done()
        begun = time.perf_counter()
        manager.request_abort()
        await asyncio.wait([waiting])
        returned = time.perf_counter() - begun
        while await asyncio.to_thread(read_metric, url, "vllm:num_requests_running"):
            pass
        return running, returned, time.perf_counter() - begun


def generate_long(client: Any) -> Any:
    """A `generate_fn` of the longest answers."""

    async def generate(prompts: Sequence[str], seeds: Sequence[int]) -> list[Any]:
        await client.completions.create(
            model="tiny", prompt=[1], seed=seeds[0], max_tokens=MOST_TOKENS, extra_body={"ignore_eos": True}
        )
        raise AssertionError("the answer came before the abort")

    return generate


def read_metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric of the server over its series with these labels."""
    lines = httpx2.get(f"{url}/metrics", timeout=60).text.splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    series = [line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and all(part in line for part in wanted)]
    assert series, f"the server has no metric {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in series)


def measure(batches: int, rounds: int) -> None:
    """Start a server and print the table and the times of an abort."""
    from real_vllm import running_vllm
    from tiny_policy import save_tiny_policy

    if not os.environ.get("LUDIC_VLLM_PYTHON"):
        raise SystemExit("LUDIC_VLLM_PYTHON names no interpreter with vLLM; `make vllm` builds .venv-vllm/bin/python")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = save_tiny_policy(folder / "policy")
        url = stack.enter_context(running_vllm(folder / "policy", model, folder / "server.log")).url
        asyncio.run(time_batches(url, 1.0, 0, 1))
        times: dict[tuple[float, int], list[tuple[float, int, int]]] = {row: [] for row in SERVED_ROWS}
        for _ in range(rounds):
            for row in SERVED_ROWS:
                times[row].append(asyncio.run(time_batches(url, *row, batches)))
        print("| factor, K | s a batch | of factor 1 | tokens / s | tokens a batch | largest lag |\n|---|---|---|---|---|---|")
        base = median(seconds for seconds, _, _ in times[SERVED_ROWS[0]])
        for (factor, max_lag), measured in times.items():
            seconds, tokens = median(one[0] for one in measured), fmean(one[1] for one in measured)
            speed = sum(one[1] for one in measured) / sum(one[0] for one in measured)
            cells = [f"{factor:g}, {max_lag}", f"{seconds / batches:.2f}", f"{seconds / base:.2f}", f"{speed:.0f}"]
            print("|", " | ".join([*cells, f"{tokens / batches:.0f}", str(max(one[2] for one in measured))]), "|", flush=True)
        for _ in range(rounds):
            running, returned, ended = asyncio.run(time_abort(url))
            print(
                f"abort: {running:.0f} requests ran; generate_batch ended after {returned:.2f} s, the server's last after {ended:.2f} s"
            )
