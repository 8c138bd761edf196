"""What an episode must have given to count as played."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ludic.errors import DataError, RolloutError
from ludic.types import Rollout, Step, TokenTrace


class GarbageError(RolloutError, DataError):
    """An episode ended and gave what is no rollout; it counts as failed."""


def check_rollouts(given: Any) -> list[Rollout]:
    """The rollouts of one episode. Raises GarbageError for anything else than rollouts of text
    with finite rewards."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise GarbageError(f"the protocol returned {type(given).__name__} (TypeError); it must return a list of Rollout")
    for rollout in given:
        if not isinstance(rollout, Rollout):
            raise GarbageError(f"the protocol returned a list that holds {type(rollout).__name__}; it must hold Rollout")
        _check_rollout(rollout)
    return list(given)


def _check_rollout(rollout: Rollout) -> None:
    _check_type(rollout.id, str, "the id of a rollout")
    _check_type(rollout.meta, dict, "the meta of a rollout")
    _check_type(rollout.steps, list, "the steps of a rollout")
    for step in rollout.steps:
        _check_type(step, Step, "a step of a rollout")
        _check_step(step)
    numbers = [step.index for step in rollout.steps]
    if len(set(numbers)) < len(numbers):
        raise GarbageError(
            f"the steps of a rollout are numbered {numbers}; each needs a number of its own, by which it gets its credit"
        )


def _check_type(value: Any, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise GarbageError(f"{what} is of type {type(value).__name__}; it must be a {kind.__name__}")


def _check_step(step: Step) -> None:
    _check_type(step.index, int, "the index of a step")
    _check_type(step.info, dict, f"the info of step {step.index}")
    if step.trace is not None:
        _check_type(step.trace, TokenTrace, f"the trace of step {step.index}")
    for name in ("prev_obs", "action", "next_obs"):
        value = getattr(step, name)
        if not isinstance(value, str) and (name, value) != ("next_obs", None):
            raise GarbageError(f"{name} of step {step.index} is of type {type(value).__name__}; it must be text")
    if not _is_finite_number(step.reward):
        raise GarbageError(f"the reward of step {step.index} is {step.reward!r}; it must be a finite number")
    logps = None if step.trace is None else step.trace.completion_logprobs
    if logps is not None and not all(map(math.isfinite, logps)):
        raise GarbageError(f"the log-probabilities of step {step.index} are not all finite")


def _is_finite_number(value: Any) -> bool:
    """Numbers of numpy and torch are numbers; text that spells one is not."""
    try:
        return math.isfinite(0.0 + value)
    except (TypeError, ValueError):
        return False
