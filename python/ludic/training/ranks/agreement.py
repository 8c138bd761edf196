"""Errors that all ranks learn of, and answers that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ludic.training import watchdog
from ludic.training.ranks.collectives import rank
from ludic.training.ranks.session import current_rendezvous

T = TypeVar("T")

WAIT_S = 7200.0
"""How long a rank waits for the others outside of the phases of the watchdog."""


@contextmanager
def agree(doing: str) -> Iterator[None]:
    """Raise on every rank if the block fails on any: its own error, or RankError with the error of
    a rank that failed. Without this, the others would wait in the next collective until the group's
    timeout.

    The block must take part in its collectives also after an error. All ranks call it, and meet at
    the store, until the deadline of the watchdog's phase.
    """
    together = current_rendezvous()
    if together is None:
        yield
        return
    with together.agree(doing, watchdog.remaining_s(WAIT_S)):
        yield


@contextmanager
def rank_0_alone(doing: str) -> Iterator[list[Any]]:
    """Work in the block on rank 0 alone; the other ranks, which do nothing in theirs, wait for its
    end at the store. Its error is raised on all. The JSON values that rank 0 puts into the list are
    in the lists of all ranks afterwards.

    >>> with rank_0_alone("measuring") as shared:
    ...     if rank() == 0:
    ...         shared.append(measure())
    """
    together = current_rendezvous()
    if together is None:
        yield []
        return
    with together.rank_0_alone(doing, watchdog.remaining_s(WAIT_S)) as values:
        yield values


def ask_rank_0(doing: str, question: Callable[[], T]) -> T:
    """The JSON value of `question`, which is called on rank 0 alone. Use it for values read from
    files: ranks that look for themselves may see different ones. Its error is raised on all, as by
    `agree`."""
    with rank_0_alone(doing) as shared:
        if rank() == 0:
            shared.append(question())
    answer: T = shared[0]
    return answer


def barrier() -> None:
    """Wait for all ranks."""
    with agree("waiting for all ranks"):
        pass
