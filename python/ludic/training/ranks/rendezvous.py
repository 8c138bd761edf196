"""Messages of ranks through a store, in addition to collectives: arrival, questions and answers,
failures, and requests to stop.

A wait at the store has a deadline of its own, says who is missing, and ends early with the error of
a rank that failed. A collective has the timeout of its group and says neither, so nothing that
takes long is waited for in one.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ludic.errors import TRY_AGAIN, RankError
from ludic.training.ranks.liveness import LEFT, Liveness, name_ranks
from ludic.training.ranks.rank_store import RankStore

FAILURE, STOP = "failure", "stop"
"""Keys of the store."""
FIRST_DELAY_S, LAST_DELAY_S = 0.001, 0.05
"""A wait asks the store again after a delay, which grows between these bounds."""
LONGEST_PAUSE_S = 0.1
"""The longest time between two looks for a message."""
RANKS_PER_DELAY = 64
"""The last delay is for this number of ranks; more of them ask less often."""
REPLY_S = 1.0
"""How long a rank whose collective failed waits for the others to say that theirs did too."""


@dataclass(frozen=True)
class Failure:
    """An error that ended a rank, as the others read it."""

    rank: int
    host: str
    text: str
    exit_code: int = TRY_AGAIN
    """The exit status of all ranks, since they end for the same reason."""

    def to_error(self, doing: str | None, world_size: int) -> RankError:
        """The error that the other ranks raise. `doing`: what failed, None if the rank ended."""
        what = "the run failed" if doing is None else f"{doing} failed"
        message = f"{what} on rank {self.rank} of {world_size}, on {self.host}: {self.text}"
        return RankError(message, exit_code=self.exit_code)


class Rendezvous:
    """The store of a group of ranks, seen from one of them. All ranks must call `agree` and
    `rank_0_alone` in the same order."""

    def __init__(
        self, store: Any, rank: int, world_size: int, *, exit_code: Callable[[BaseException], int] = lambda error: TRY_AGAIN
    ) -> None:
        """`exit_code`: the exit status of all ranks for an error on this one."""
        self.rank, self.world_size = rank, world_size
        self._store = RankStore(store)
        self._lives = Liveness(self._store, rank, world_size)
        self._is_asked_to_stop = False
        self._exit_code = exit_code
        self.host = socket.gethostname()
        self._number = 0
        self._read: list[str] = []
        """Keys since the last agreement."""
        self._messages: dict[str, int] = {}
        """Topic -> the number of its messages that this rank has posted or read."""

    def gather(self, timeout_s: float) -> None:
        """Wait until all ranks have come. Raises RankError, which names those that have not."""
        self.announce()
        self._store.set(f"here/{self.rank}", socket.gethostname())
        if self._store.count("here/count") == self.world_size:
            self._store.set("here/all", "")
        try:
            self._wait("here/all", timeout_s)
        except TimeoutError:
            missing = [rank for rank in range(self.world_size) if not self._store.has(f"here/{rank}")]
            raise RankError(
                f"{name_ranks(missing)} of {self.world_size} did not come to the store within {timeout_s:g} s (ranks.rendezvous_timeout_s)"
            ) from None

    def announce(self) -> None:
        """Tell the other ranks which process this one is: `gather` does."""
        self._lives.announce()

    def give_sign(self) -> None:
        """Tell the other ranks that this one lives."""
        self._lives.give_sign()

    @contextmanager
    def agree(self, doing: str, timeout_s: float) -> Iterator[None]:
        """Raise on every rank if the block fails on any: its own error, or RankError with the error
        of the rank that failed first."""
        error: Exception | None = None
        try:
            yield
        except Exception as failed:
            error = failed
        other = self._exchange(doing, error, timeout_s)
        if error is not None:
            raise error
        if other is not None:
            raise other.to_error(doing, self.world_size)

    def _exchange(self, doing: str, error: Exception | None, timeout_s: float) -> Failure | None:
        """Tell the others how it went here, wait for all of them, and return the first failure."""
        base = self._next_key()
        try:
            if error is not None:
                self._store.set_first(f"{base}/failure", json.dumps(asdict(self.describe(error))))
            self._store.set(f"{base}/{self.rank}", doing)
            if self._store.count(f"{base}/count") == self.world_size:
                self._store.set(f"{base}/all", "")
            self._wait(f"{base}/all", timeout_s)
        except TimeoutError:
            missing = [rank for rank in range(self.world_size) if not self._store.has(f"{base}/{rank}")]
            raise error or RankError(
                f"{doing}: rank {self.rank} waited {timeout_s:g} s for {name_ranks(missing)} of {self.world_size}"
            ) from error
        except RankError:
            if error is not None:
                raise error from None
            raise
        if error is None:  # else its own error says more than where the others are
            self._check_same(self._store.get(f"{base}/0"), doing)
        failure = self._read_failure(f"{base}/failure")
        if self.rank == 0:
            for key in self._read:  # all ranks are beyond it
                self._store.delete(key)
        self._read = [f"{base}/{name}" for name in ("count", "all", "failure", *range(self.world_size))]
        return failure

    def _check_same(self, at_rank_0: str, doing: str) -> None:
        if at_rank_0 != doing:
            raise RankError(f"the ranks have diverged: rank 0 is at {at_rank_0!r}, rank {self.rank} at {doing!r}")

    @contextmanager
    def rank_0_alone(self, doing: str, timeout_s: float) -> Iterator[list[Any]]:
        """Run the block on rank 0, while the others wait for it after theirs. Yields a list; the
        JSON values that rank 0 puts into it are in the lists of all ranks in the end."""
        key = self._next_key()
        self._read.append(key)
        values: list[Any] = []
        if self.rank > 0:
            yield values
            try:
                self._wait(key, timeout_s)
            except TimeoutError:
                raise RankError(f"{doing}: rank {self.rank} waited {timeout_s:g} s for rank 0 to finish it") from None
            answer = json.loads(self._store.get(key))
            self._check_same(answer["doing"], doing)
            if "failure" in answer:
                raise Failure(**answer["failure"]).to_error(doing, self.world_size)
            values[:] = answer["values"]
            return
        try:
            yield values
            self._store.set(key, json.dumps({"doing": doing, "values": values}))
        except BaseException as error:
            self._store.set(key, json.dumps({"doing": doing, "failure": asdict(self.describe(error))}))
            raise

    def open_topic(self) -> str:
        """A name for messages of rank 0. All ranks open theirs in the same order."""
        topic = f"topic/{len(self._messages)}"
        self._messages[topic] = 0
        return topic

    def post(self, topic: str, kind: str, **content: Any) -> None:
        """Post the next message of a topic, of JSON values, on rank 0. The last rank that reads it
        removes it."""
        self._store.set(f"{topic}/{self._messages[topic]}", json.dumps({"kind": kind, **content}))
        self._messages[topic] += 1

    def post_error(self, topic: str, error: BaseException) -> None:
        """Post an error instead of the next message, on rank 0: `read` raises it."""
        self.post(topic, "error", error=describe_error(error, exit_code=self._exit_code(error)))

    async def read(
        self, topic: str, kind: str, patience_s: float, *, while_waiting: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """The next message of a topic, which must be of this kind. The wait may be long: it is no
        collective. `while_waiting` is called before each look.

        Raises the error in a message of kind "error" (`describe_error`); RankError if no message
        comes within `patience_s` seconds, if another rank failed or was killed, and for another
        kind.
        """
        number = self._messages[topic]
        key, started = f"{topic}/{number}", time.monotonic()
        while_waiting()
        while not self._store.has(key):
            self._check_others(key)
            waited = time.monotonic() - started
            if waited > patience_s:
                raise RankError(
                    f"rank {self.rank} waited {waited:.3g} s for rank 0 ({kind} {number}), in vain; raise patience_s ({patience_s:g} s)"
                )
            await asyncio.sleep(min(LONGEST_PAUSE_S, max(0.001, waited / 20)))
            while_waiting()
        message: dict[str, Any] = json.loads(self._store.get(key))
        self._messages[topic] += 1
        if self._store.count(f"{key}/read") == self.world_size - 1:
            for read in (key, f"{key}/read"):
                self._store.delete(read)
        if message["kind"] == "error":
            raise rebuild_error(message["error"])
        if message["kind"] != kind:
            raise RankError(f"rank {self.rank} is at {kind} and rank 0 at {message['kind']}; call the source in the same order")
        return message

    def describe(self, error: BaseException) -> Failure:
        """An error of this rank, for the others."""
        return Failure(self.rank, self.host, f"{type(error).__name__}: {error}", self._exit_code(error))

    def report_failure(self, failure: Failure) -> None:
        """Tell all ranks that this one ends. The first failure of a run stays."""
        self._store.set_first(FAILURE, json.dumps(asdict(failure)))

    def find_failure(self) -> Failure | None:
        """The first failure that ended another rank."""
        failure = self._read_failure(FAILURE)
        return None if failure is None or failure.rank == self.rank else failure

    def describe_ended(self) -> str | None:
        """Which ranks on this machine were killed, for a wait that is none at the store; None if
        none was."""
        return self._lives.describe_ended()

    def request_stop(self, signum: int) -> None:
        """Ask for a stop of the run, which every rank reads with `requested_stop`. From now on this
        rank does not wait for one that gives no sign of life."""
        self._is_asked_to_stop = True
        self._store.set_first(STOP, str(signum))

    def requested_stop(self) -> int | None:
        """The signal that any rank was asked to stop by."""
        return int(self._store.get(STOP)) if self._store.has(STOP) else None

    def find_silent(self) -> list[int]:
        """The ranks that do not say within `REPLY_S` that a collective failed on them too. Called
        where one failed here."""
        self._store.set(f"lost/{self.rank}", "")
        ends = time.monotonic() + REPLY_S
        while True:
            silent = [rank for rank in range(self.world_size) if not self._store.has(f"lost/{rank}")]
            if not silent or time.monotonic() > ends or self.find_failure() is not None:
                return silent
            time.sleep(LAST_DELAY_S)

    def leave(self) -> None:
        """Say that this rank needs the store no more."""
        self._store.set(f"{LEFT}/{self.rank}", "")

    def wait_until_left(self, rank: int, timeout_s: float) -> None:
        """Wait until a rank has left, at most `timeout_s`, and no longer once a rank failed or is
        lost."""
        ends = time.monotonic() + timeout_s
        while not self._store.has(f"{LEFT}/{rank}") and time.monotonic() < ends and self.find_failure() is None:
            if self._lives.look(time.monotonic(), stopping=self._is_asked_to_stop) is not None:
                return
            time.sleep(LAST_DELAY_S)

    def _next_key(self) -> str:
        self._number += 1
        return f"meeting/{self._number}"

    def _wait(self, key: str, timeout_s: float) -> None:
        """Raises TimeoutError, or RankError if another rank fails or is killed meanwhile."""
        ends, delay = time.monotonic() + timeout_s, FIRST_DELAY_S
        longest = LAST_DELAY_S * max(1.0, self.world_size / RANKS_PER_DELAY)
        while not self._store.has(key):
            self._check_others(key)
            if time.monotonic() > ends:
                raise TimeoutError
            time.sleep(delay)
            delay = min(delay * 1.5, longest)

    def _check_others(self, key: str) -> None:
        """Raise RankError if a rank has failed, or is lost while `key`, which is waited for, is not
        there."""
        self.raise_if_failed()
        lost = self._lives.look(time.monotonic(), stopping=self._is_asked_to_stop)
        if lost is not None and not self._store.has(key):  # it may have come, and they have ended, since it was looked for
            self.raise_if_failed()
            raise RankError(lost)

    def raise_if_failed(self) -> None:
        """Raise RankError if another rank has said that it ends."""
        failure = self.find_failure()
        if failure is not None:
            raise failure.to_error(None, self.world_size)

    def _read_failure(self, key: str) -> Failure | None:
        return Failure(**json.loads(self._store.get(key))) if self._store.has(key) else None


_KNOWN = ("ludic.errors", "builtins", "torch", "safetensors", "jinja2")
"""Modules with errors for which the exit status of a rank, or what its user is told, depends on the
class."""


def describe_error(error: BaseException, *, exit_code: int = TRY_AGAIN, rank: int = 0) -> dict[str, Any]:
    """An error as JSON: its text, its host, the names of its class and of that class's bases, the
    nearest first, and the other values that decide the exit status of a rank. `exit_code`: the exit
    status of this rank, whose number is `rank`."""
    kinds = [base.__name__ for base in type(error).__mro__ if issubclass(base, Exception)]
    facts: dict[str, Any] = {}
    if isinstance(error, OSError):
        facts["errno"] = error.errno
    if isinstance(error, RankError):
        facts["exit_code"] = error.exit_code
    place = f"rank {rank}, on {socket.gethostname()}"
    return {"kinds": kinds, "text": str(error), "place": place, "facts": facts, "exit_code": exit_code}


def rebuild_error(description: dict[str, Any]) -> Exception:
    """The error of `describe_error`: of the first of its classes that a module of `_KNOWN` has and
    that takes just a message, else a RankError with its exit status. A note says where it was
    raised, and as what.

    Example: a user's `class NoMoreGames(RequestsExhausted)` becomes RequestsExhausted with the note
    `raised by rank 0, on host1, as NoMoreGames`.
    """
    text, place, kinds = description["text"], description["place"], description["kinds"]
    for kind in kinds:
        if kind in ("LudicError", "Exception"):
            continue  # they say nothing
        for module in _KNOWN:
            known = vars(importlib.import_module(module)).get(kind)
            if not (isinstance(known, type) and issubclass(known, Exception)):
                continue
            try:
                error = known(text)
            except TypeError:  # it needs more than a message
                continue
            for name, value in description["facts"].items():
                setattr(error, name, value)
            error.add_note(f"raised by {place}" + ("" if kind == kinds[0] else f", as {kinds[0]}"))
            return error
    if not kinds:
        return RankError(f"{place}, was interrupted ({text or 'without a message'})")
    return RankError(f"{kinds[0]} on {place}: {text or 'without a message'}", exit_code=description["exit_code"])
