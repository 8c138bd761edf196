"""Loggers that wrap other loggers."""

from collections.abc import Mapping
from typing import Any

from hypothesis import given, strategies as st

from ludic.runs.loggers import PhaseLogger, ThinnedLogger


class Remembering:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, Any]]] = []

    def log(self, step: int, stats: Mapping[str, Any]) -> None:
        self.seen.append((step, dict(stats)))


@given(every=st.integers(1, 20), last=st.integers(1, 60))
def test_every_nth_step_and_the_last_are_displayed(every: int, last: int) -> None:
    inner = Remembering()
    logger = ThinnedLogger(inner, every, last)
    for step in range(1, last + 1):
        logger.log(step, {})
    shown = [step for step, _ in inner.seen]
    assert shown == sorted({*range(every, last + 1, every), last})


def test_the_phase_is_logged_beside_the_statistics() -> None:
    inner = Remembering()
    PhaseLogger(inner, "warm_up").log(4, {"train/loss": 0.5})
    assert inner.seen == [(4, {"phase": "warm_up", "train/loss": 0.5})]
