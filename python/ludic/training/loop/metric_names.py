"""The names of an evaluation's metrics: as its evaluator gives them, and as they are logged."""

from __future__ import annotations

OF_SEEDS = "eval_seed/"
"""Prefix of metrics that an evaluator gives with it, and that are logged as they are."""


def eval_key(name: str) -> str:
    """The key under which a metric of an evaluator is logged."""
    return name if name.startswith(OF_SEEDS) else f"eval/{name}"


def bare_name(metric: str) -> str:
    """The name that the evaluator gives: `loss` for `loss`, `eval_loss` and `eval/loss`, and
    `eval_seed/pass_at_n` for itself."""
    return metric if metric.startswith(OF_SEEDS) else metric.removeprefix("eval/").removeprefix("eval_")
