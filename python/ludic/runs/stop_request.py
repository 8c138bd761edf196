"""Ctrl-C ends a run after the current step, with everything saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from ludic.launch.rank_environment import STOP_ONCE
from ludic.training import ranks
from ludic.training.ranks.rendezvous import Rendezvous


class Interrupted(Exception):
    """The run was stopped by a request, and its progress is saved."""


class StopRequest:
    """While entered, the first Ctrl-C or SIGTERM makes it true and the second raises
    KeyboardInterrupt."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.signum: int | None = None
        self._notify = notify
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signum is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self and not _is_repeated(signum):
            raise KeyboardInterrupt
        self.signum = signum
        self._notify("Stopping after this step; press Ctrl-C again to stop immediately.")


class SharedStopRequest(StopRequest):
    """A stop of all ranks: a signal to one of them is seen on all."""

    def __init__(self, notify: Callable[[str], None], meeting: Rendezvous) -> None:
        super().__init__(notify)
        self._meeting = meeting
        self._was_signalled = False
        """Whether this rank itself got a signal."""

    def __bool__(self) -> bool:
        if self.signum is None:
            self.signum = self._meeting.requested_stop()
        return self.signum is not None

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        if self._previous and any(raised):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher ends all ranks after one: this one must still say why

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._was_signalled and not _is_repeated(signum):
            raise KeyboardInterrupt
        self._was_signalled = True
        self.signum = signum
        self._meeting.request_stop(signum)
        self._notify("Stopping all ranks after this step.")


def make_stop_request(notify: Callable[[str], None]) -> StopRequest:
    """The stop request of this process, or of all ranks after `ranks.start`."""
    meeting = ranks.current_rendezvous()
    return StopRequest(notify) if meeting is None else SharedStopRequest(notify, meeting)


def _is_repeated(signum: int) -> bool:
    """Whether the signal may be one that came before, by another way."""
    return signum == signal.SIGTERM and os.environ.get(STOP_ONCE) == "1"
