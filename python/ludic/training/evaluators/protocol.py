"""What the trainer asks of an evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ludic.training.stats import Reducer


class Evaluator(Protocol):
    """Measures the policy. It runs on rank 0 alone unless it is a `RankedEvaluator`."""

    async def eval(
        self,
        *,
        reducers: Mapping[str, Reducer] | None = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> tuple[list[Any], dict[str, float]]:
        """(records, metrics). The evaluator decides what is left None."""


@runtime_checkable
class RankedEvaluator(Evaluator, Protocol):
    """An evaluator that says which ranks it runs on."""

    on_all_ranks: bool
    """Whether all ranks must call `eval`, each of which then knows the metrics."""


def runs_on_all_ranks(evaluator: Evaluator) -> bool:
    """Whether all ranks call `evaluator`; an evaluator that does not say runs on rank 0."""
    return isinstance(evaluator, RankedEvaluator) and evaluator.on_all_ranks
