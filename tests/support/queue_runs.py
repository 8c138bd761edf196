"""Runs of a trainer and actors over a log, in virtual time, in which processes are killed at any
call, the log is unreachable at times, and its data are lost. A whole run takes a moment, and the
same seed gives the same run.

Weights are a hash of what was trained, samples a hash of their number and version, so that any
difference shows.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jumping_loop import play_jumping
from memory_log import MemoryLog

from ludic.errors import QueueError
from ludic.training.queue.actor import run_actor
from ludic.training.queue.base import GroupLog, Work
from ludic.training.queue.entries import Group
from ludic.training.queue.opening import QueueRetryPolicy
from ludic.training.queue.source import QueueBatchSource
from ludic.training.types import SAWBatch
from ludic.types import Rollout, Step, TokenTrace

CALL_S = 0.005
"""Virtual duration of a call of the log."""


class Killed(BaseException):
    """The process is gone: no handler of an Exception runs."""


@dataclass
class Plan:
    """What is run, and what goes wrong."""

    order: str = "exact"
    steps: int = 20
    groups_per_batch: int = 4
    ahead: int = 2
    num_actors: int = 2
    checkpoint_every: int = 5
    seed: int = 0
    calls_between_kills: float = 0
    """Mean number of calls that a process makes before it is killed; 0: none is killed."""
    unreachable_rate: float = 0.0
    """Rate of calls that raise QueueError, before or after they took effect."""
    data_losses: int = 0
    bad_entries: dict[int, int] = field(default_factory=dict)
    """Group -> how many of its first deliveries are damaged."""
    max_attempts: int = 10**6


@dataclass
class Run:
    """What happened."""

    trained: dict[int, list[int]] = field(default_factory=dict)
    """Step -> the groups that were trained in it, in the history that counts."""
    weights: str = ""
    """After the last step."""
    redone: int = 0
    redone_differently: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    lags: list[int] = field(default_factory=list)
    """Step minus the version that a group was offered with."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    virtual_s: float = 0.0

    @property
    def numbers(self) -> list[int]:
        return [number for step in sorted(self.trained) for number in self.trained[step]]


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def sample(work: Work) -> list[Rollout]:
    """The rollouts of a group: a pure function of its number and version."""
    reward = int(digest(work.number, work.version), 16) / 2**48
    steps = [Step(0, f"{work.number}", "a", None, reward, False, True, trace=TokenTrace([1], [2, 3], [-0.5, -0.25]), ts_ns=1)]
    return [Rollout(f"{work.number}-{i}", steps, {"request_meta": {"group_id": work.number}}) for i in range(2)]


class Connection:
    """The log as one process sees it, until the process is killed in a call: before it has taken
    effect or after."""

    def __init__(self, log: GroupLog, rng: random.Random, plan: Plan) -> None:
        self._log, self._rng, self._plan = log, rng, plan
        mean = plan.calls_between_kills
        self._left = rng.expovariate(1 / mean) if mean else float("inf")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._log, name)

        def run(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left < 0 and self._rng.random() < 0.5:
                raise Killed
            fails = self._rng.random() < self._plan.unreachable_rate
            if fails and self._rng.random() < 0.5:
                raise QueueError("unreachable")
            if name == "deliver":
                args = (args[0], self._damage(args[0].work.number, args[1]))
            answer = call(*args, **options)
            if self._left < 0:
                raise Killed
            if fails:
                raise QueueError("the answer was lost")
            return answer

        return run

    def _damage(self, number: int, payload: bytes) -> bytes:
        if self._plan.bad_entries.get(number, 0) <= 0:
            return payload
        self._plan.bad_entries[number] -= 1
        return payload[:-1]


def virtual_patience() -> QueueRetryPolicy:
    async def run(operation: Callable[[], Any]) -> Any:
        await asyncio.sleep(CALL_S)
        answer = operation()
        if answer == []:  # a real log waits for an entry, up to a second
            await asyncio.sleep(10 * CALL_S)
        return answer

    return QueueRetryPolicy(300.0, clock=asyncio.get_running_loop().time, run=run)


def in_virtual_time(test: Callable[[MemoryLog], Awaitable[None]]) -> Callable[[], None]:
    """Run the test on a virtual clock, with a log as its argument."""

    def run() -> None:
        async def main() -> None:
            log = MemoryLog(asyncio.get_running_loop().time)
            await asyncio.wait_for(test(log), timeout=20_000)

        play_jumping(main())

    return run


async def batch_of(groups: Sequence[Group]) -> SAWBatch:
    facts = [(group.number, [step.reward for rollout in group.played for step in rollout.steps]) for group in groups]
    return SAWBatch([], {"numbers": [group.number for group in groups], "digest": digest(facts)})


class Simulation:
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rng, self.run = plan, random.Random(plan.seed), Run()
        self.checkpoint: str | None = None
        self.journal: dict[int, tuple[list[int], str]] = {}
        self.num_started = 0

    def connect(self) -> Connection:
        self.num_started += 1
        return Connection(self.log, random.Random(f"{self.plan.seed}/{self.num_started}"), self.plan)

    async def train(self) -> None:
        plan = self.plan
        source = QueueBatchSource(
            self.connect(),  # type: ignore[arg-type]
            run="r",
            groups_per_batch=plan.groups_per_batch,
            to_batch=batch_of,
            ahead=plan.ahead,
            order=plan.order,  # type: ignore[arg-type]
            num_batches=plan.steps,
            max_attempts=plan.max_attempts,
            patience=virtual_patience(),
            claim_s=1e6,
        )
        step, weights = 0, digest()
        if self.checkpoint is not None:
            saved = json.loads(self.checkpoint)
            step, weights = saved["step"], saved["weights"]
            source.load_state_dict(saved["source"])
            await source.announce(step)
        try:
            while step < plan.steps:
                batch = await source.next_batch()
                weights = digest(weights, batch.meta["numbers"], batch.meta["digest"])
                await asyncio.sleep(self.rng.uniform(0.0, 0.3))
                self.record(step, batch.meta["numbers"], weights, batch.meta)
                step += 1
                await source.announce(step)
                if step % plan.checkpoint_every == 0 or step == plan.steps:
                    self.checkpoint = json.dumps({"step": step, "weights": weights, "source": source.state_dict()})
                    await source.checkpoint_saved()
            await source.close_queue()
        finally:
            await source.aclose()

    def record(self, step: int, numbers: list[int], weights: str, meta: dict[str, Any]) -> None:
        if step in self.journal:
            self.run.redone += 1
            self.run.redone_differently += self.journal[step] != (numbers, weights)
        self.journal[step] = (numbers, weights)
        self.run.metrics.append(meta)

    async def act(self, name: str) -> None:
        rng = random.Random(f"{self.plan.seed}/{name}/{self.num_started}")

        async def play(work: Work) -> list[Rollout]:
            await asyncio.sleep(min(rng.lognormvariate(-2, 1), 2.0))
            return sample(work)

        async def load(version: int) -> None:
            assert version <= max(self.journal, default=-1) + 1, "weights that were never published"

        await run_actor(
            self.connect(),  # type: ignore[arg-type]
            play=play,
            weights=load,
            actor=f"{name}-{self.num_started}",
            order=self.plan.order,  # type: ignore[arg-type]
            lease_s=1.5,
            max_attempts=self.plan.max_attempts,
            patience=virtual_patience(),
        )

    async def lose_data_at_times(self) -> None:
        for _ in range(self.plan.data_losses):
            await asyncio.sleep(self.rng.uniform(0.5, 6.0))
            self.log.lose_data()

    async def go(self) -> Run:
        self.log = MemoryLog(asyncio.get_running_loop().time)
        starts = {"trainer": self.train, **{f"actor{i}": lambda i=i: self.act(f"actor{i}") for i in range(self.plan.num_actors)}}
        tasks = {name: asyncio.create_task(start()) for name, start in starts.items()}
        losses = asyncio.create_task(self.lose_data_at_times())
        while not tasks["trainer"].done() or isinstance(tasks["trainer"].exception(), Killed):
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            for name, task in tasks.items():
                if task.done() and isinstance(task.exception(), Killed):
                    self.run.kills[name] += 1
                    await asyncio.sleep(self.rng.uniform(0.0, 0.3))
                    tasks[name] = asyncio.create_task(starts[name]())
                elif task.done() and name != "trainer":
                    task.result()
                    assert tasks["trainer"].done() or self.log.is_closed(), "an actor ended before the run"
                    tasks[name] = asyncio.create_task(asyncio.Event().wait())
        tasks["trainer"].result()
        for task in (*tasks.values(), losses):
            task.cancel()
        await asyncio.gather(*tasks.values(), losses, return_exceptions=True)
        self.run.trained = {step: numbers for step, (numbers, _) in self.journal.items()}
        self.run.weights = self.journal[self.plan.steps - 1][1]
        self.run.virtual_s = asyncio.get_running_loop().time()
        return self.run


def simulate(plan: Plan) -> Run:
    """Run the plan to its end."""
    return play_jumping(asyncio.wait_for(Simulation(plan).go(), timeout=50_000))
