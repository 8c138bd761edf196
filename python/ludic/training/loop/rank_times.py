"""How long the ranks wait for the slowest one of a step, and which one is slow again and again."""

from __future__ import annotations

import logging
import socket
import statistics
from collections.abc import Sequence

import torch

from ludic.training import ranks

logger = logging.getLogger(__name__)

SLOW, STEPS_IN_A_ROW = 1.5, 5
"""A rank is named in a warning if it takes so many times the median for so many steps."""


class RankTimes:
    """Compares the seconds that the ranks compute in each step.

    Without a wrapper a rank computes alone until the gradients are summed. The forward and backward
    passes of a wrapped model exchange tensors, so that all ranks appear equally slow.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._last_slow: int | None = None

    def compare(self, seconds: float, device: torch.device | str) -> dict[str, float]:
        """`ranks/wait_s` and `ranks/slowest`, from the seconds of this rank; empty with one rank.
        All ranks call it: one exchange of a number."""
        if not ranks.is_distributed():
            return {}
        own = [0.0] * ranks.world_size()
        own[ranks.rank()] = seconds
        everyone = ranks.sum_over_ranks(own, device)
        self._warn_if_slow(everyone)
        return describe_wait(everyone)

    def _warn_if_slow(self, everyone: Sequence[float]) -> None:
        slow = find_slow(everyone)
        self._in_a_row = self._in_a_row + 1 if slow is not None and slow == self._last_slow else int(slow is not None)
        self._last_slow = slow
        if self._in_a_row == STEPS_IN_A_ROW and slow == ranks.rank():
            logger.error(
                "rank %d, on %s, has taken %.1f times as long as the median of the ranks for %d steps: all wait for it",
                slow,
                socket.gethostname(),
                everyone[slow] / statistics.median(everyone),
                STEPS_IN_A_ROW,
            )


def describe_wait(seconds: Sequence[float]) -> dict[str, float]:
    """The mean over ranks of the time that a rank waits for the slowest, and the number of that.

    Example: [1.0, 3.0] seconds: rank 0 waits 2 s and rank 1 none, so `wait_s` is 1, `slowest` 1.
    """
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return {"ranks/wait_s": seconds[slowest] - statistics.fmean(seconds), "ranks/slowest": float(slowest)}


def find_slow(seconds: Sequence[float]) -> int | None:
    """The slowest rank, if it took more than `SLOW` times the median.

    Example: of two ranks, [1.0, 4.0] has the median 2.5 and names rank 1.
    """
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return slowest if seconds[slowest] > SLOW * statistics.median(seconds) > 0 else None
