"""A pool of groups whose calls take a given time on the virtual clock and may fail, in a run that
may be killed."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jumping_loop import play_jumping

from ludic.errors import RequestsExhausted
from ludic.inference.request import derive_seed
from ludic.training.rollouts.group_pool import GroupBatch, GroupPool, Ticket


class CountedPrompts:
    """Prompts that are their own position; `total` of them, or None for endless ones."""

    def __init__(self, total: int | None = None):
        self.total, self.position = total, 0

    def take(self) -> tuple[int, Any]:
        if self.position == self.total:
            raise RequestsExhausted("no prompts are left")
        self.position += 1
        return self.position - 1, self.at(self.position - 1)

    def at(self, position: int) -> str:
        return f"prompt {position}"


@dataclass(frozen=True)
class Fate:
    """What happens to calls and groups. It follows from the seed and the ticket, as the answer of a
    model that heeds its seed would."""

    seed: int = 0
    rejected: float = 0.0
    """Share of groups that the filter refuses."""
    failing: float = 0.0
    """Share of calls that raise."""
    doomed: float = 0.0
    """Share of groups of which a member always raises."""
    slow: float = 3.0
    """Calls take up to so many seconds."""
    closing_s: float = 0.0
    """How long calls take to end after they are cancelled."""
    spares: bool = True
    """Only every fourth group can be lost: calls of the others fail in the first attempt alone, so
    that no series of losses is an error."""

    def draw(self, *key: object) -> float:
        """From 0 to 1."""
        mixed = derive_seed(zlib.crc32(repr((key, self.seed)).encode()), 1)
        return mixed / 2**31

    def is_rejected(self, ordinal: int) -> bool:
        return self.draw("reject", ordinal) < self.rejected

    async def play(self, ticket: Ticket) -> list[int]:
        assert ticket.prompt.startswith("prompt ")
        try:
            await asyncio.sleep(self.slow * self.draw("time", ticket.ordinal, ticket.member, ticket.attempt) ** 3)
        except asyncio.CancelledError:
            await asyncio.sleep(self.closing_s)
            raise
        can_be_lost = not self.spares or ticket.ordinal % 4 == 3
        is_doomed = can_be_lost and ticket.member == 0 and self.draw("doom", ticket.ordinal) < self.doomed
        can_fail = can_be_lost or ticket.attempt == 0
        if is_doomed or (can_fail and self.draw("fail", ticket.ordinal, ticket.member, ticket.attempt) < self.failing):
            raise ConnectionError("the server did not answer")
        return [ticket.ordinal, ticket.member, ticket.seed]


@dataclass
class PlayedPool:
    """A pool with the prompts that it takes, and laws that hold after every change."""

    fate: Fate
    settings: dict[str, Any]
    total: int | None = None
    running: int = 0
    most_running: int = 0
    calls: int = 0
    prompts: CountedPrompts = field(init=False)
    pool: GroupPool = field(init=False)

    def __post_init__(self):
        self.prompts = CountedPrompts(self.total)
        self.pool = GroupPool(play=self._play, accept=self._accept, prompts=self.prompts, **self.settings)

    async def _play(self, ticket: Ticket) -> list[int]:
        self.calls += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self.fate.play(ticket)
        finally:
            self.running -= 1
            self.check()

    def _accept(self, group: Any) -> bool:
        assert [member[:2] for member in group.members] == [[group.ordinal, member] for member in range(len(group.members))]
        return not self.fate.is_rejected(group.ordinal)

    def check(self) -> None:
        """The invariant of the ledger."""
        counts = self.pool.counts
        assert counts.given + counts.rejected + counts.lost + counts.kept == counts.admitted == self.prompts.position

    def check_batch(self, batch: GroupBatch) -> None:
        """The laws of a batch that is not the last one."""
        self.check()
        ordinals = [group.ordinal for group in batch]
        assert ordinals == sorted(set(ordinals))
        assert all(0 <= lag <= self.pool.max_lag for lag in batch.lags), batch.lags
        assert all(group.prompt is None or group.prompt == f"prompt {group.position}" for group in batch)

    def save(self) -> str:
        """The state of pool and prompts, as a checkpoint holds it."""
        return json.dumps({"position": self.prompts.position, "pool": self.pool.state_dict()})

    def load(self, saved: str) -> None:
        state = json.loads(saved)
        self.prompts.position = state["position"]
        self.pool.load_state_dict(state["pool"])
        self.check()


@dataclass
class KilledRun:
    """What a run that was killed and resumed has trained, and what became of all groups."""

    trained: list[list[int]]
    """The ordinals of each batch."""
    members: dict[int, list[Any]]
    """Ordinal -> its members when it was trained."""
    kills: int
    total: int
    """The number of prompts."""
    counts: Any

    def check(self, fate: Fate) -> None:
        """Nothing is lost, doubled or split: every group is trained, or has a reason not to be."""
        times = Counter(ordinal for batch in self.trained for ordinal in batch)
        assert all(number == 1 for number in times.values())
        assert len(times) == self.counts.given
        refused = {ordinal for ordinal in range(self.counts.admitted) if fate.is_rejected(ordinal)}
        assert not refused & set(times)
        assert self.counts.given + self.counts.rejected + self.counts.lost == self.counts.admitted == self.total
        for ordinal, members in self.members.items():
            assert [member[:2] for member in members] == [[ordinal, member] for member in range(len(members))]


def play_killed(fate: Fate, settings: dict[str, Any], *, total: int, kills: int, draw: Callable[[], float]) -> KilledRun:
    """Train `total` prompts. The run is killed `kills` times after a random time, and goes on from
    a checkpoint, which is saved at random moments, also while a batch is waited for."""
    trained: list[list[int]] = []
    members: dict[int, list[Any]] = {}
    played = PlayedPool(fate, settings, total)
    saved, saved_steps = played.save(), 0
    for remaining in range(kills, -1, -1):
        played = PlayedPool(fate, settings, total)
        played.load(saved)
        del trained[saved_steps:]
        checkpoints = play_jumping(_play_life(played, trained, members, draw, is_last=remaining == 0))
        if checkpoints:
            saved, saved_steps = checkpoints[-1]
    return KilledRun(trained, members, kills, total, played.pool.counts)


async def _play_life(
    played: PlayedPool, trained: list[list[int]], members: dict[int, list[Any]], draw: Callable[[], float], *, is_last: bool
) -> list[tuple[str, int]]:
    """Play until the end, or until a kill. Returns the checkpoints, each with its number of
    steps."""
    checkpoints: list[tuple[str, int]] = []

    async def save_often() -> None:
        while True:
            await asyncio.sleep(4 * draw())
            checkpoints.append((played.save(), len(trained)))

    async def train() -> None:
        async with played.pool:
            while True:
                try:
                    batch = await played.pool.next_batch()
                except RequestsExhausted:
                    return
                played.check_batch(batch)
                trained.append([group.ordinal for group in batch])
                members.update((group.ordinal, group.members) for group in batch)
                await asyncio.sleep(draw())

    saver, trainer = asyncio.create_task(save_often()), asyncio.create_task(train())
    await asyncio.wait([trainer], timeout=None if is_last else 12 * draw())
    saver.cancel()
    if trainer.done():
        trainer.result()
        return checkpoints
    trainer.cancel()
    await asyncio.wait([trainer])
    return checkpoints
