"""Starts the processes of a run, restarts those that fail, and ends all when the trainer is done.

What a process does is not known here, only how it ends:

| exit status | the trainer | another process |
|---|---|---|
| 0 | the run is done: all are ended, status 0 | it is done |
| 2, 78 | all are ended, with this status | not restarted |
| 130, 143 | it was asked to stop and has: all are ended, with this status | restarted |
| anything else, a signal, a lost machine | restarted | restarted |

Restarts are limited by `RestartBudget`. A trainer that may not be restarted ends the run, with its
status; another process does so only if no process of its role is left. Several trainers that need
each other are restarted together, from one budget: if one ends, the others cannot go on.

`events.jsonl` has what happened to the processes of a run, one line for each event.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.errors import DO_NOT_RETRY, LaunchError
from ludic.launch.process import DONE, USAGE, Ended, Place, Process, Started, check_processes
from ludic.launch.state import BEAT_S, LaunchState, ProcessState

logger = logging.getLogger(__name__)

WINDOW_S = 600.0
"""The time in which a process may be restarted `Process.restarts` times."""
STOP_GRACE_S = 30.0
"""How long the trainer may take to save and end after a polite stop."""
OTHERS_GRACE_S = 10.0
"""How long the other processes may take to end once the trainer has ended."""
POLL_S = 0.05
FINAL = (USAGE, DO_NOT_RETRY)
"""Exit statuses that a restart would not change."""
POLITE = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit statuses of a trainer that was asked to stop, saved, and ended."""


@dataclass
class _Slot:
    """A process, and its next start."""

    process: Process
    budget: RestartBudget
    state: ProcessState
    start_at: float | None = 0.0
    """When to start it, by the supervisor's clock; None if it is not to be started."""

    @property
    def names(self) -> dict[str, str]:
        """The process in an event."""
        return {"name": self.process.name, "role": self.process.role}

    @property
    def is_live(self) -> bool:
        return self.start_at is not None or self.state.state in ("starting", "running")


class Supervisor:
    """Runs `processes` on `place` until all with the role `trainer` have ended with status 0.

    >>> with contextlib.closing(LocalPlace(run)) as place:
    ...     status = Supervisor(place, processes, folder=run).run()

    Roles are started in the order of `processes`; the first of a role starts once all earlier ones
    run. With `least`, the run goes on while this number of trainers are left. `folder` gets
    events.jsonl and launch.json. `note` gets one line for each event that a person should know.
    `clock` and `sleep` are replaced in tests.
    """

    def __init__(
        self,
        place: Place,
        processes: Sequence[Process],
        *,
        folder: Path,
        place_name: str = "local",
        least: int | None = None,
        note: Callable[[str], None] = logger.warning,
        window_s: float = WINDOW_S,
        stop_grace_s: float = STOP_GRACE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        check_processes(list(processes))
        if not any(process.is_trainer for process in processes):
            raise LaunchError(f"no process has the role trainer; roles: {sorted({p.role for p in processes})}")
        self._place, self._folder, self._note = place, folder, note
        self._least = sum(process.is_trainer for process in processes) if least is None else least
        self._stop_grace_s, self._clock, self._sleep = stop_grace_s, clock, sleep
        self._slots = {
            process.name: _Slot(process, RestartBudget(process.restarts, window_s), ProcessState(process.name, process.role))
            for process in processes
        }
        self._window_s = window_s
        self._are_together = self._least == len(self._trainers())
        """Whether trainers are restarted together."""
        for slot in self._trainers() if self._are_together else ():
            slot.budget = self._trainers()[0].budget
        self._events = EventLog(folder / EVENTS)
        now = time.time()
        states = [slot.state for slot in self._slots.values()]
        self._launch = LaunchState(os.getpid(), socket.gethostname(), place_name, now, now, processes=states)
        self._signals: list[int] = []
        self._stopped_by: int | None = None
        self._stop_deadline = 0.0
        self._beat_at = 0.0

    def run(self) -> int:
        """Run to the end and return the exit status of the trainer, or 128 plus the signal's number
        after SIGTERM or SIGINT.

        The first signal is passed to the trainer, which then has `stop_grace_s` to save and end; so
        are the following ones. Raises LaunchError if a process cannot be started the first time.
        """
        status: int | None = None
        with catch_stop_signals(self.request_stop):
            try:
                while (status := self.tick()) is None:
                    self._sleep(POLL_S)
            finally:
                self._end_all(status)
        return status

    def request_stop(self, number: int = signal.SIGTERM) -> None:
        """Do what the signal would do. May be called from a signal handler or another thread."""
        self._signals.append(number)

    def tick(self) -> int | None:
        """One round: note the ended processes, start the next ones. Returns the exit status at the
        end."""
        status = None
        for report in self._place.poll():
            if isinstance(report, Started):
                slot = self._slots[report.name]
                slot.state.pid, slot.state.host, slot.state.log = report.pid, report.host, report.log
                self._change(slot, "running")
                self._events.write("start", **slot.names, pid=report.pid, host=report.host, restarts=slot.state.restarts)
            elif (found := self._on_ended(report)) is not None:
                status = found if status is None or (status != DONE and found in FINAL) else status
        if self._signals:
            self._on_signal(self._signals.pop(0))
        if status is None and self._stopped_by is not None:
            status = self._stop_status()
        if status is None and self._stopped_by is None:
            status = self._start_due()
        if self._clock() >= self._beat_at:
            self._write_state()
        return status

    def _trainers(self) -> list[_Slot]:
        return [slot for slot in self._slots.values() if slot.process.is_trainer]

    def _may_start(self, slot: _Slot) -> bool:
        """A role waits for the roles before it until they have started once."""
        for other in self._slots.values() if slot.state.since is None else ():
            if other.process.role == slot.process.role:
                break
            if other.state.since is None or other.state.state == "starting":
                return False
        return True

    def _start_due(self) -> int | None:
        """Start the processes that are due. Returns the exit status of the run if one cannot be
        started again, and the run is over."""
        for slot in self._slots.values():
            if slot.start_at is None or slot.start_at > self._clock() or not self._may_start(slot):
                continue
            again, slot.start_at = slot.state.last_end is not None, None
            self._change(slot, "starting")
            try:
                self._place.start(slot.process)
            except LaunchError as error:
                if not again:
                    raise
                if (status := self._on_ended(Ended(slot.process.name, None, None, 0.0, str(error)))) is not None:
                    return status
        return None

    def _on_ended(self, ended: Ended) -> int | None:
        """Returns the exit status of the run if it is over."""
        slot = self._slots[ended.name]
        self._record_end(slot, ended)
        return self._judge(slot, ended)

    def _judge(self, slot: _Slot, ended: Ended) -> int | None:
        """Do what the end of a process asks for. Returns the exit status of the run if it is
        over."""
        is_trainer = slot.process.is_trainer
        if slot.start_at is not None:  # it is to be restarted with another one that ended before
            if not is_trainer or ended.code not in (*FINAL, *POLITE):
                return None
            slot.start_at = None
        if self._stopped_by is not None:
            self._change(slot, "ended")
            return None
        if ended.status == DONE:
            self._change(slot, "ended")
            return DONE if is_trainer and not any(other.is_live for other in self._trainers()) else None
        if is_trainer and ended.code in POLITE:
            self._note(f"{ended.describe()}: it was asked to stop")
            self._change(slot, "ended")
            return ended.status
        delay = None if ended.code in FINAL else slot.budget.spend(self._clock())
        if delay is None:
            return self._give_up(slot, ended)
        others = [other for other in self._trainers() if other is not slot] if is_trainer and self._are_together else []
        self._schedule(slot, delay)
        together = f" with {', '.join(other.process.name for other in others)}" if others else ""
        self._note(
            f"{ended.describe()}; restarted{together} {f'after {delay:g} s' if delay else 'immediately'}{_indent(ended.tail)}"
        )
        ends = self._place.stop([other.process.name for other in others if other.is_live], 0.0)
        for end in ends:
            self._record_end(self._slots[end.name], end)
        for other in others:
            self._schedule(other, delay)
        for end in ends:
            if end.code in FINAL:  # it had ended before, by itself
                return self._judge(self._slots[end.name], end)
        return None

    def _schedule(self, slot: _Slot, delay: float) -> None:
        """Start the process again after `delay` seconds."""
        slot.start_at = self._clock() + delay
        slot.state.restarts += 1
        self._change(slot, "waiting")
        self._events.write("restart", **slot.names, delay_s=delay, restarts=slot.state.restarts)

    def _give_up(self, slot: _Slot, ended: Ended) -> int | None:
        self._change(slot, "given_up")
        self._events.write("give_up", **slot.names, status=ended.status)
        window = f"{self._window_s / 60:g} minutes"
        why = (
            "a restart would not help" if ended.code in FINAL else f"it has used its {slot.process.restarts} restarts in {window}"
        )
        self._note(f"{ended.describe()} and is not restarted: {why}; its log is {slot.state.log}{_indent(ended.tail)}")
        others = [other for other in self._slots.values() if other.process.role == slot.process.role]
        left = sum(other.is_live or other.state.state == "ended" for other in others)
        least = self._least if slot.process.is_trainer else 1
        return ended.status if left < least or not any(other.is_live for other in others) else None

    def _on_signal(self, number: int) -> None:
        if self._stopped_by is None:
            self._stopped_by, self._stop_deadline = number, self._clock() + self._stop_grace_s
            self._events.write("stop", signal=number)
            self._note(f"stopping: waiting up to {self._stop_grace_s:g} s for the trainer to save and end")
        for slot in self._slots.values():
            slot.start_at = None
            if slot.process.is_trainer:
                self._place.ask(slot.process.name, number)

    def _stop_status(self) -> int | None:
        """The exit status of a run that was asked to stop, once its trainer has ended or its time
        is over."""
        assert self._stopped_by is not None
        trainers = self._trainers()
        if any(slot.is_live for slot in trainers):
            if self._clock() < self._stop_deadline:
                return None
            self._note(f"the trainer did not end within {self._stop_grace_s:g} s and is killed")
            return 128 + self._stopped_by
        codes = {(slot.state.last_end or {}).get("code") for slot in trainers}
        return DONE if codes == {DONE} else DO_NOT_RETRY if DO_NOT_RETRY in codes else 128 + self._stopped_by

    def _end_all(self, status: int | None) -> None:
        """End what still runs: first the trainer, which others may hold up, then they. Without a
        status, or once the time of a polite stop is over, nothing is waited for."""
        trainers = [slot for slot in self._trainers() if slot.is_live]
        for slot in self._slots.values():
            slot.start_at = None
        grace_s = self._stop_grace_s if status is not None and self._stopped_by is None else 0.0
        try:
            self._record_all(self._place.stop([slot.process.name for slot in trainers], grace_s))
            self._record_all(self._place.close(0.0 if status is None else OTHERS_GRACE_S))
        finally:
            self._launch.exit_status = status
            self._events.write("end_of_launch", status=status)
            self._write_state()

    def _record_all(self, ended: Sequence[Ended]) -> None:
        for end in ended:
            slot = self._slots[end.name]
            self._record_end(slot, end)
            self._change(slot, "ended")

    def _record_end(self, slot: _Slot, ended: Ended) -> None:
        facts = {"code": ended.code, "signal": ended.signal}
        slot.state.last_end = {"time": time.time(), **facts, "text": ended.describe()}
        slot.state.pid = None
        tail = {} if ended.status == DONE else {"tail": ended.tail}
        self._events.write("end", **slot.names, **facts, seconds=round(ended.seconds, 3), **tail)

    def _change(self, slot: _Slot, state: str) -> None:
        slot.state.state, slot.state.since = state, time.time()
        self._beat_at = 0.0  # write the state soon

    def _write_state(self) -> None:
        self._launch.beat, self._beat_at = time.time(), self._clock() + BEAT_S
        try:
            self._launch.write(self._folder)
        except OSError as error:
            logger.warning("launch.json cannot be written (%s); `ludic status` shows an old state", error.strerror)


@contextlib.contextmanager
def catch_stop_signals(request_stop: Callable[[int], None]) -> Iterator[None]:
    """While entered in the main thread, SIGTERM and SIGINT call `request_stop` with the number."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
    previous = {number: signal.signal(number, lambda number, _: request_stop(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _indent(tail: str) -> str:
    """The end of a log, below a line."""
    return "".join(f"\n    {line}" for line in tail.splitlines()[-5:])


EVENTS = "events.jsonl"


class EventLog:
    """Appends events to a file. Several processes may write to the same file.

    >>> EventLog(run / EVENTS).write("start", name="actor0", pid=4711)

    appends `{"time": 1790000000.0, "event": "start", "name": "actor0", "pid": 4711}`, the time in
    seconds since 1970. A line that cannot be written is reported once and lost: no run ends for its
    log.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self.path, self._now = path, now
        self._failed = False

    def write(self, event: str, /, **facts: Any) -> None:
        line = json.dumps({"time": round(self._now(), 3), "event": event, **facts}).encode() + b"\n"
        try:
            with self.path.open("ab+", buffering=0) as file:  # one system call, so that lines of several processes do not mix
                size = file.tell()
                torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"  # what a killed process left of a line
                file.write(b"\n" + line if torn else line)
        except OSError as error:
            if not self._failed:
                logger.warning("%s cannot be written (%s); events are not recorded", self.path, error.strerror)
            self._failed = True


FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 30.0


class RestartBudget:
    """At most `limit` restarts in any `window_s` seconds.

    The first restart in a window is immediate, the next waits 1 s, then 2, 4, ..., at most 30 s.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit, self._window_s = limit, window_s
        self._times: deque[float] = deque()

    def spend(self, now: float) -> float | None:
        """The seconds to wait before a restart, which is taken from the budget; None if it is used
        up. `now` is in seconds and never decreases."""
        while self._times and now - self._times[0] >= self._window_s:
            self._times.popleft()
        recent = len(self._times)
        if recent >= self._limit:
            return None
        delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (recent - 1)) if recent else 0.0
        self._times.append(now + delay)
        return delay
