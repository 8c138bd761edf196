"""Ctrl-C ends a run after the current step, with everything saved."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from ludic.launch.rank_environment import STOP_ONCE

if TYPE_CHECKING:
    from ludic.training.ranks.rendezvous import Rendezvous


class Interrupted(Exception):
    """The run was stopped by a request, and its progress is saved."""


class StopRequest:
    """While entered, the first Ctrl-C or SIGTERM makes it true and the second raises
    KeyboardInterrupt. With a `meeting` it is a stop of all ranks: a signal to one of them is seen
    on all."""

    def __init__(self, notify: Callable[[str], None], meeting: Rendezvous | None = None) -> None:
        self.signum: int | None = None
        self._notify, self._meeting = notify, meeting
        self._was_signalled = False
        """Whether this rank itself got a signal."""
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        if self.signum is None and self._meeting is not None:
            self.signum = self._meeting.requested_stop()
        return self.signum is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *raised: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._meeting is not None and self._previous and any(raised):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher ends all ranks after one: this one must still say why

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        is_second = self.signum is not None if self._meeting is None else self._was_signalled
        may_be_repeated = signum == signal.SIGTERM and os.environ.get(STOP_ONCE) == "1"  # the same one, by another way
        if is_second and not may_be_repeated:
            raise KeyboardInterrupt
        self._was_signalled, self.signum = True, signum
        if self._meeting is None:
            self._notify("Stopping after this step; press Ctrl-C again to stop immediately.")
        else:
            self._meeting.request_stop(signum)
            self._notify("Stopping all ranks after this step.")


def listen_for_signals() -> tuple[asyncio.Event, list[int]]:
    """An event that Ctrl-C and SIGTERM set in the running loop, and the numbers of the signals that
    came."""
    stop, signals = asyncio.Event(), list[int]()

    def stop_on(number: int) -> None:
        signals.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop_on, number)
    return stop, signals
