"""Ends a process that hangs: when a phase of training exceeds its deadline, the stacks of all
threads are printed and the process exits with 75 (try again).

A run of several ranks starts it (`Watchdog.start`). A run of one process does not: no other rank
waits for it, and its user can look. `phase` and `watched` mark the phases and cost nothing without
it.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

from ludic.errors import TRY_AGAIN, check_value

F = TypeVar("F", bound=Callable[..., Any])

GRACE_S = 10.0
"""How long a rank may take to end by itself after another one has failed."""
STUCK_S = 10.0
"""How much later than the watchdog the C library ends a process whose interpreter is stuck."""
MARGIN = 0.1
"""Share of a deadline by which a wait ends earlier than the watchdog, since its error says more; at
most `LONGEST_MARGIN_S`."""
LONGEST_MARGIN_S = 2.0
LONGEST_TICK_S = 1.0
MOST_STACKS = 100
"""How many threads `faulthandler` prints, the newest first."""


@dataclass(frozen=True)
class _Phase:
    name: str
    since: float
    deadline_s: float


class Watchdog:
    """Watches one process from a thread.

    >>> watchdog = Watchdog({"step": 3600.0, "save": 3600.0})
    >>> watchdog.start()
    >>> with phase("step"):
    ...     train_step()

    The deadline of a phase counts from its start, and again from the end of a phase inside it:
    what counts is the time without any progress from phase to phase. Between phases nothing is
    watched. `find_failure` is asked about once a second whether another rank has failed, and
    returns what to print and the exit status of all ranks; this process then has `GRACE_S` to end
    by itself.
    """

    def __init__(
        self,
        deadlines_s: Mapping[str, float],
        *,
        name: str = "",
        find_failure: Callable[[], tuple[str, int] | None] = lambda: None,
        report: Callable[[str], None] = lambda text: None,
        end: Callable[[int], Any] = os._exit,
        out: TextIO | None = None,
    ) -> None:
        """`name`: what the process is called in the message, such as `rank 1 of 2`. `report` is
        called with the message before the process ends, and may hang."""
        for phase_name, seconds in deadlines_s.items():
            check_value(f"the deadline of {phase_name} in seconds", seconds, above=0)
        self.deadlines_s = dict(deadlines_s)
        self._name, self._find_failure, self._report, self._end = name, find_failure, report, end
        self._out = out or sys.stderr
        self._phase: _Phase | None = None
        self._failed_since: float | None = None
        self._closed = threading.Event()
        self._tick_s = min([LONGEST_TICK_S, *(seconds / 10 for seconds in deadlines_s.values())])
        self._armed: _Phase | None = None

    def start(self) -> None:
        """Watch from now on; this is the watchdog of `phase`, `watched` and `remaining_s`."""
        global _active
        _active = self
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        global _active
        self._closed.set()
        _active = None
        if self._armed is not None:
            faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See the class. A name without a deadline is not watched."""
        outer = self._phase
        self._phase = self._begin(name)
        try:
            yield
        finally:
            self._phase = None if outer is None else self._begin(outer.name)

    def enter_last(self, name: str) -> None:
        """Begin a phase that only the end of the process ends."""
        self._phase = self._begin(name)

    def _begin(self, name: str) -> _Phase | None:
        return _Phase(name, time.monotonic(), self.deadlines_s[name]) if name in self.deadlines_s else None

    def remaining_s(self) -> float | None:
        """Seconds that a wait in the present phase may take; None outside of phases."""
        phase = self._phase
        if phase is None:
            return None
        margin = min(LONGEST_MARGIN_S, MARGIN * phase.deadline_s)
        return max(0.0, phase.since + phase.deadline_s - margin - time.monotonic())

    def _watch(self) -> None:
        while not self._closed.wait(self._tick_s):
            phase, now = self._phase, time.monotonic()
            self._arm(phase, now)
            if phase is not None and now - phase.since > phase.deadline_s:
                self._stop_process(
                    f"the phase {phase.name} has taken {now - phase.since:.0f} s; its deadline is {phase.deadline_s:g} s"
                )
            failure = self._find_failure()
            if failure is None:
                continue
            self._failed_since = now if self._failed_since is None else self._failed_since
            if now - self._failed_since > GRACE_S:
                text, code = failure
                self._stop_process(f"{text}. This process did not end within {GRACE_S:g} s", code)

    def _arm(self, phase: _Phase | None, now: float) -> None:
        """Have a thread of the C library end the process later, which needs no interpreter: one
        that is stuck in a call that holds its lock runs no other thread."""
        if phase is self._armed:
            return
        if phase is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            left = phase.since + phase.deadline_s - now
            faulthandler.dump_traceback_later(max(0.0, left) + STUCK_S, exit=True, file=self._out)
        self._armed = phase

    def _stop_process(self, why: str, code: int = TRY_AGAIN) -> None:
        message = f"ludic: {self._name + ': ' if self._name else ''}{why}. All stacks follow; the exit status is {code}"
        print(f"\n{message}", file=self._out, flush=True)
        print_stacks(self._out)
        reporter = threading.Thread(target=self._report, args=(why,), daemon=True)
        reporter.start()
        reporter.join(timeout=1.0)
        self._end(code)


_active: Watchdog | None = None


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase of the process's watchdog, if it has one."""
    if _active is None:
        yield
        return
    with _active.phase(name):
        yield


def remaining_s(default: float) -> float:
    """Seconds that a wait in the present phase may take; `default` without a watchdog or
    phase."""
    left = None if _active is None else _active.remaining_s()
    return default if left is None else left


def watched(name: str) -> Callable[[F], F]:
    """Decorate a function or coroutine function that is a phase."""

    def decorate(function: F) -> F:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run(*args: Any, **kwargs: Any) -> Any:
                with phase(name):
                    return await function(*args, **kwargs)
        else:

            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                with phase(name):
                    return function(*args, **kwargs)

        wrapped: Any = run
        return wrapped

    return decorate


def print_stacks(out: TextIO | None = None) -> None:
    """Print the stacks of this process: of the newest `MOST_STACKS` threads, and of the main thread
    in any case."""
    faulthandler.dump_traceback(file=out or sys.stderr, all_threads=True)
    stacks = sys._current_frames()
    main = stacks.get(threading.main_thread().ident or 0)
    if len(stacks) > MOST_STACKS and main is not None:
        print("Main thread (most recent call last):", file=out or sys.stderr)
        traceback.print_stack(main, file=out or sys.stderr)
