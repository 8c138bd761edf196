"""The interface of evaluators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ludic.training.stats import Reducer
from ludic.training.types import RolloutRequest


class Evaluator(Protocol):
    """Measures the policy. It runs on rank 0 only, unless it has
    `on_all_ranks`, which is true."""

    async def eval(
        self,
        *,
        requests: Sequence[RolloutRequest] | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> tuple[list[Any], dict[str, float]]:
        """(records, metrics). For an argument that is None the evaluator uses its default."""


def runs_on_all_ranks(evaluator: Evaluator) -> bool:
    """Whether all ranks call `evaluator`, and all get the metrics."""
    return bool(getattr(evaluator, "on_all_ranks", False))
