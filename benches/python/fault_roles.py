"""The trainer and the actors of `faults`, as light as they can be: hashes stand for weights and
samples. The protocol is the library's, and so are the logs; nothing imports torch.

The weights after step k are a hash of those after step k - 1 and of the samples of the step. A
sample is a hash of its number and of the weights that it was sampled with. So one sample of other
weights, one that is missing, or one that is trained twice changes the weights at the end.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.files.atomic import write_text
from ludic.training.batching.pipeline import PipelineBatchSource, run_pipeline_actor
from ludic.training.queue.actor import run_actor
from ludic.training.queue.base import GroupLog, Work
from ludic.training.queue.entries import Group, decode_samples
from ludic.training.queue.redis import RedisLog
from ludic.training.queue.source import QueueBatchSource
from ludic.training.queue.sqlite import SQLiteLog
from ludic.training.types import SAWBatch, SAWItem
from ludic.types import Rollout, Step, TokenTrace, group_of

GROUPS_PER_BATCH, MEMBERS, AHEAD, SAVE_EVERY = 4, 2, 2, 5
LEASE_S = 1.5
ATTEMPTS = 50
"""A group is not given up because its actors are killed: that is what they are here for."""
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Plan:
    """What all processes of a run know."""

    folder: Path
    url: str | None
    """Of the Redis server; None for a file of SQLite."""
    protocol: str
    """`exact` or `arrival`: numbered groups in this order; `samples`: run_pipeline_actor."""
    steps: int
    step_s: float
    """How long the trainer sleeps in each step."""

    def open_log(self) -> GroupLog:
        if self.url is not None:
            return RedisLog(self.url, "faults", deadline_s=10.0)
        return SQLiteLog(self.folder / "queue.sqlite")

    def append(self, name: str, line: Any) -> None:
        """Append a line to a file of the folder. It outlives a kill of the process."""
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read(self, name: str) -> list[Any]:
        """The lines of a file; [] if there is none."""
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def sample(number: int, member: int, weights: str) -> str:
    return digest("sample", number, member, weights)


def trained_weights(weights: str, groups: Sequence[tuple[int, list[str]]]) -> str:
    return digest("step", weights, [tuple(group) for group in groups])


def undisturbed_weights(steps: int) -> str:
    """The weights at the end of a run in order `exact` in which nothing dies: batch k is sampled
    with version `max(0, k - AHEAD)`."""
    versions = [""]
    for step in range(steps):
        sampled_with = versions[max(0, step - AHEAD)]
        numbers = range(step * GROUPS_PER_BATCH, (step + 1) * GROUPS_PER_BATCH)
        groups = [(number, [sample(number, member, sampled_with) for member in range(MEMBERS)]) for number in numbers]
        versions.append(trained_weights(versions[-1], groups))
    return versions[-1]


# ---- numbered groups -----------------------------------------------------------------------------


async def act(plan: Plan) -> None:
    """Play groups until the trainer is done."""
    weights = ""

    async def load(version: int) -> None:
        nonlocal weights
        weights = json.loads((plan.folder / f"version_{version}").read_text())

    async def play(work: Work) -> list[Rollout]:
        await asyncio.sleep(random.uniform(0.002, 0.02))
        return [_rollout(work.number, member, weights) for member in range(MEMBERS)]

    order = "exact" if plan.protocol == "exact" else "arrival"
    await run_actor(
        plan.open_log(),
        play=play,
        weights=load,
        actor=str(os.getpid()),
        order=order,
        lease_s=LEASE_S,
        max_attempts=ATTEMPTS,
        patience_s=PATIENCE_S,
    )


def _rollout(number: int, member: int, weights: str) -> Rollout:
    text = sample(number, member, weights)
    trace = TokenTrace([1, 2], list(text.encode()), [-0.5] * len(text), "stop")
    step = Step(0, "prompt", text, None, 1.0, False, True, trace=trace)
    return Rollout(f"{number}-{member}", [step], {"request_meta": {"group_id": number}, "member": member})


async def _batch_of_groups(groups: Sequence[Group]) -> SAWBatch:
    content = [(group.number, [rollout.steps[0].action for rollout in group.played]) for group in groups]
    return SAWBatch([], {"groups": content})


async def train(plan: Plan) -> None:
    """Train from the last checkpoint to the end."""
    order = "exact" if plan.protocol == "exact" else "arrival"
    source = QueueBatchSource(
        plan.open_log(),
        run="faults",
        groups_per_batch=GROUPS_PER_BATCH,
        to_batch=_batch_of_groups,
        ahead=AHEAD,
        order=order,
        num_batches=plan.steps,
        max_attempts=ATTEMPTS,
        patience_s=PATIENCE_S,
    )
    step, weights = _load_checkpoint(plan, source)
    await _publish(plan, source, step, weights)
    while step < plan.steps:
        batch = await source.next_batch()
        await asyncio.sleep(plan.step_s)
        weights, step = trained_weights(weights, batch.meta["groups"]), step + 1
        facts = {key: batch.meta[key] for key in ("queue/duplicates", "queue/aside", "queue/claimed")}
        plan.append("journal", [step, batch.meta["groups"], weights, facts])
        await _publish(plan, source, step, weights)
        if step % SAVE_EVERY == 0 or step == plan.steps:
            await _save_checkpoint(plan, source, step, weights)
    await source.close_queue()


async def _publish(plan: Plan, source: QueueBatchSource, version: int, weights: str) -> None:
    write_text(plan.folder / f"version_{version}", json.dumps(weights))
    await source.announce(version)


# ---- samples without numbers ---------------------------------------------------------------------


class _Producer:
    """Stands for an engine: plays two groups of two samples a call."""

    def __init__(self, name: str) -> None:
        self._name, self._calls = name, 0

    async def generate_batch(self, **_: Any) -> SAWBatch:
        self._calls += 1
        await asyncio.sleep(random.uniform(0.005, 0.02))
        groups = [f"{self._name}-{2 * self._calls - 2 + group}" for group in range(2)]
        return SAWBatch([_item(group, member) for group in groups for member in range(MEMBERS)])


def _item(group: str, member: int) -> SAWItem:
    meta = {"rollout_id": f"{group}-{member}", "total_reward": 1.0, "request_meta": {"group_id": group}}
    return SAWItem([1, 2, 3], [1, 1, 1], [0, 1, 1], 0.5, meta)


class _Acknowledged:
    """A log that notes each push that was acknowledged."""

    def __init__(self, log: GroupLog, plan: Plan, name: str) -> None:
        self._log, self._plan, self._name, self._sent = log, plan, name, 0

    def version(self) -> int | None:
        return self._log.version()

    def push(self, payload: bytes, *, max_entries: int) -> bool:
        done = self._log.push(payload, max_entries=max_entries)
        if done:
            self._plan.append("acknowledged", [f"{self._name}-{self._sent}", time.time()])
            self._sent += 1
        return done


async def produce(plan: Plan) -> None:
    """Send samples until the process is killed."""
    name = str(os.getpid())
    log: Any = _Acknowledged(plan.open_log(), plan, name)
    await run_pipeline_actor(_Producer(name), list, _no_credit(), "", log=log, max_entries=64)


def _no_credit() -> Any:
    return None  # `_Producer` assigns the weights itself


async def consume(plan: Plan) -> None:
    """Train from the last checkpoint to the end."""
    source = PipelineBatchSource(
        "", batch_size=GROUPS_PER_BATCH * MEMBERS, patience_s=PATIENCE_S, wait_s=PATIENCE_S, log=plan.open_log()
    )
    step, weights = _load_checkpoint(plan, source)
    while step < plan.steps:
        batch = await source.next_batch()
        await asyncio.sleep(plan.step_s)
        groups: dict[str, list[str]] = {}
        for item in batch.items:
            groups.setdefault(item.meta["request_meta"]["group_id"], []).append(item.meta["rollout_id"])
        weights, step = digest(weights, sorted(groups)), step + 1
        facts = {key: batch.meta[key] for key in ("queue/duplicates", "queue/aside")}
        plan.append("journal", [step, list(groups.items()), weights, facts])
        if step % SAVE_EVERY == 0 or step == plan.steps:
            await _save_checkpoint(plan, source, step, weights)


def note_untrained(plan: Plan) -> None:
    """Note the groups that are in the queue: what was sent and is not trained yet is not lost."""
    log = plan.open_log()
    for entry in log.read(None, limit=10_000):
        plan.append("untrained", group_of(decode_samples(entry.payload).items[0].meta))
    log.disconnect()


# ---- checkpoints ---------------------------------------------------------------------------------


def _load_checkpoint(plan: Plan, source: Any) -> tuple[int, str]:
    """Step and weights; the source goes on from its state."""
    path = plan.folder / "checkpoint.json"
    if not path.exists():
        return 0, ""
    state: Mapping[str, Any] = json.loads(path.read_text())
    source.load_state_dict(state["source"])
    return state["step"], state["weights"]


async def _save_checkpoint(plan: Plan, source: Any, step: int, weights: str) -> None:
    content = {"step": step, "weights": weights, "source": source.state_dict()}
    write_text(plan.folder / "checkpoint.json", json.dumps(content))
    await source.checkpoint_saved()
