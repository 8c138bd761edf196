"""The interface of evaluators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ludic.training.stats import Reducer


class Evaluator(Protocol):
    """Measures the policy. It runs on rank 0 only, unless it is a `RankedEvaluator`."""

    async def eval(
        self,
        *,
        reducers: Mapping[str, Reducer] | None = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> tuple[list[Any], dict[str, float]]:
        """(records, metrics). For an argument that is None the evaluator uses its default."""


@runtime_checkable
class RankedEvaluator(Evaluator, Protocol):
    """An evaluator that says which ranks it runs on."""

    on_all_ranks: bool
    """Whether all ranks must call `eval`. If so, all get the metrics."""


def runs_on_all_ranks(evaluator: Evaluator) -> bool:
    """Whether all ranks call `evaluator`: by default only rank 0 does."""
    return isinstance(evaluator, RankedEvaluator) and evaluator.on_all_ranks
