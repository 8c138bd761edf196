"""A board that rank 0 writes messages on, one after another, and that the other ranks read. It lies
in the store of the process group; waiting at it is not a collective, so it may take long.
"""

from __future__ import annotations

import asyncio
import builtins
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store  # torch has no public name for the last

from ludic import errors
from ludic.errors import RankError
from ludic.training import ranks

LONGEST_PAUSE_S = 0.1
"""Longest time between two looks at the board."""
_NUMBERS = itertools.count()
"""Numbers of boards: all ranks make theirs in the same order."""


class RankBoard:
    """Messages of rank 0 to all other ranks.

    Rank 0 posts the messages 0, 1, 2 and so on; each of the others reads them in that order. The
    last that reads a message removes it.
    """

    def __init__(self) -> None:
        self._store = _open_store(f"ludic/board/{next(_NUMBERS)}")
        self._count = 0
        self._flagged: set[str] = set()

    def post(self, kind: str, **content: Any) -> None:
        """Post a message, on rank 0. Without other ranks nobody reads it."""
        if self._store is not None:
            self._store.set(str(self._count), json.dumps({"kind": kind, **content}))
            self._count += 1

    async def read(self, kind: str, patience_s: float, *, while_waiting: Callable[[], None] | None = None) -> dict[str, Any]:
        """The next message, which must be of this kind. `while_waiting` is called before each look.

        Raises the posted error for a message of kind "error"; RankError if no message comes within
        `patience_s` seconds, if the store cannot be reached, and for another kind.
        """
        try:
            message = await self._wait(kind, patience_s, while_waiting)
        except RankError:
            raise
        except (RuntimeError, OSError) as error:
            raise RankError(
                f"waiting for rank 0 ({kind} {self._count}): the store of the ranks cannot be reached: {error}"
            ) from error
        if message["kind"] == "error":
            raise rebuild_error(message["error"])
        if message["kind"] != kind:
            raise RankError(
                f"rank {ranks.rank()} waits for rank 0 ({kind}), which is at another point of the run ({message['kind']}); all ranks must "
                "call the batch source in the same order"
            )
        return message

    async def _wait(self, kind: str, patience_s: float, while_waiting: Callable[[], None] | None) -> dict[str, Any]:
        assert self._store is not None
        key, started = str(self._count), time.monotonic()
        while True:
            if while_waiting is not None:
                while_waiting()
            if self._store.check([key]):
                break
            _raise_failure()
            waited = time.monotonic() - started
            if waited > patience_s:
                raise RankError(
                    f"rank {ranks.rank()} waited {waited:.3g} s for rank 0 ({kind} {self._count}), which gave none; look for the cause "
                    f"there, or raise patience_s ({patience_s:g} s) if it needs longer"
                )
            await asyncio.sleep(min(LONGEST_PAUSE_S, max(0.001, waited / 20)))
        message: dict[str, Any] = json.loads(self._store.get(key))
        self._count += 1
        if self._store.add(f"{key}/read", 1) == ranks.world_size() - 1:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/read")
        return message

    def flag(self, name: str) -> None:
        """Set a flag, on any rank and for good."""
        if self._store is not None and name not in self._flagged:
            self._store.set(name, "1")
            self._flagged.add(name)

    def is_flagged(self, name: str) -> bool:
        """Whether any rank has set the flag."""
        return self._store is not None and self._store.check([name])


def _raise_failure() -> None:
    """Raise RankError if another rank has said that it ends."""
    meeting = ranks.current_meeting()
    failure = None if meeting is None else meeting.find_failure()
    if failure is not None:
        raise failure.to_error(None, ranks.world_size())


def _open_store(prefix: str) -> Store | None:
    """The keys under `prefix` in the store that the ranks met at; None without other ranks."""
    if not ranks.is_distributed():
        return None
    return PrefixStore(prefix, _get_default_store())


def broadcast_bytes(content: bytes | None, size: int, device: torch.device) -> memoryview:
    """The `size` bytes that rank 0 passes as `content`, on all ranks, in memory that can be written
    to; others pass None."""
    own = torch.empty(size, dtype=torch.uint8) if content is None else torch.frombuffer(bytearray(content), dtype=torch.uint8)
    shared = own.to(device)
    dist.broadcast(shared, src=0)
    return shared.cpu().numpy().data


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error as JSON: its text, its host, and the names of its class and of that class's bases,
    the nearest first."""
    kinds = [base.__name__ for base in type(error).__mro__ if issubclass(base, Exception)]
    return {"kinds": kinds, "text": str(error), "host": socket.gethostname()}


def rebuild_error(description: dict[str, Any]) -> Exception:
    """The error of `describe_error`: of the first of its classes that ludic or Python has and that
    takes just a message, else a RankError. A note says where it was raised.

    Example: a user's `class NoMoreGames(RequestsExhausted)` becomes RequestsExhausted.
    """
    text, place = description["text"], f"rank 0, on {description['host']}"
    for kind in description["kinds"]:
        for known in _classes_named(kind):
            try:
                error = known(text)
            except TypeError:  # it needs more than a message
                continue
            error.add_note(f"raised by {place}")
            return error
    return RankError(f"{place}, was interrupted ({text or 'without a message'})")


def _classes_named(kind: str) -> Iterator[type[Exception]]:
    if kind in ("LudicError", "Exception"):
        return  # they say nothing
    for found in (vars(errors).get(kind), vars(builtins).get(kind)):
        if isinstance(found, type) and issubclass(found, Exception):
            yield found
