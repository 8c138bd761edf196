"""When a call that failed is repeated, and when its member is given up.

A member is given up after `max_retries` + 1 failures in a row, except in an outage, which is when
no call of any member succeeds: then a server is away, and losing groups would not help.

    max_retries = 1, seconds since the first failure of a member
    0  fails, repeated at once     0  fails again: are there successes of other calls since then,
                                      or since this call began?
       yes  it is given up         no  it is repeated after 1, 2, 4, 8, 8 ... s, until the outage
                                       is over or has lasted `patience_s`

After an outage that it has lived through, a member has `max_retries` + 1 failures again, and may
live through the next one: `max_retries` + 1 in a row, since a member that alone fails at once may
see what looks like an outage between two slow successes of others.
"""

from __future__ import annotations

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 8.0


class Outage:
    """Whether calls succeed."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.successes = 0
        """Calls that have succeeded so far."""
        self.is_reported = False
        """Whether the log has a line of the present outage."""
        self._since_s: float | None = None
        """When the first call failed after the last success, on the loop's clock."""

    def succeed(self) -> None:
        """A call has returned something."""
        self.successes += 1
        self.forget()

    def fail(self, now_s: float) -> None:
        """A call has failed."""
        if self._since_s is None:
            self._since_s = now_s

    def left_s(self, now_s: float) -> float:
        """How many seconds of patience are left."""
        return self.patience_s if self._since_s is None else max(0.0, self._since_s + self.patience_s - now_s)

    def forget(self) -> None:
        """Begin anew with all patience."""
        self._since_s, self.is_reported = None, False


class FailedCalls:
    """The failures in a row of one member."""

    def __init__(self, outage: Outage, max_retries: int) -> None:
        self._outage, self._max_retries = outage, max_retries
        self.number = 0
        self._counted = 0
        """Failures since the first one, or since an outage."""
        self._successes = 0
        """Successes of all members before the first of the counted failures."""
        self._outages = 0
        """Outages that the member has lived through since its last success."""
        self.is_waiting_out = False
        """Whether the member would be given up, were it not for an outage."""

    def fail(self, now_s: float, successes_before: int) -> float | None:
        """The member's call has failed, which began after so many successes of all members.
        Returns how many seconds to wait before the next one, or None to give the member up."""
        self._outage.fail(now_s)
        successes = self._outage.successes
        if not self.number:
            self._successes = successes
        self.number, self._counted = self.number + 1, self._counted + 1
        if successes != self._successes and self.is_waiting_out:
            self.is_waiting_out, self._counted, self._successes = False, 1, successes
            self._outages += 1
        if self._counted <= self._max_retries:
            return _wait_s(self._counted)
        left_s = self._outage.left_s(now_s)
        if successes > min(self._successes, successes_before) or not left_s or self._outages > self._max_retries + 1:
            return None
        self.is_waiting_out = True
        return min(max(FIRST_WAIT_S, _wait_s(self._counted)), left_s)


def _wait_s(failures: int) -> float:
    """Seconds before the call after so many failures: 0, 1, 2, 4, 8, 8 ..."""
    return 0.0 if failures <= 1 else min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(failures - 2, 30))
