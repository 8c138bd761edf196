"""The interface of evaluators, and the names of their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ludic.training.reducers import Reducer
from ludic.training.types import RolloutRequest

OF_SEEDS = "eval_seed/"
"""Prefix of metrics that an evaluator gives with it, and that are logged as they are."""


class Evaluator(Protocol):
    """Measures the policy. It runs on rank 0 only, unless it has an `on_all_ranks` that is
    true."""

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


def eval_key(name: str) -> str:
    """The key under which a metric of an evaluator is logged."""
    return name if name.startswith(OF_SEEDS) else f"eval/{name}"


def bare_name(metric: str) -> str:
    """The name that the evaluator gives: `loss` for `loss`, `eval_loss` and `eval/loss`, and
    `eval_seed/pass_at_n` for itself."""
    return metric if metric.startswith(OF_SEEDS) else metric.removeprefix("eval/").removeprefix("eval_")
