"""How often a process may be restarted, and how long to wait before it."""

from __future__ import annotations

from collections import deque

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
