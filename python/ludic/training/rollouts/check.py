"""Checks the rollouts that a protocol returned for an episode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ludic.errors import DataError, RolloutError
from ludic.list_fields import stored
from ludic.types import Rollout, Step, TokenTrace


class GarbageError(RolloutError, DataError):
    """An episode returned invalid rollouts; it counts as failed."""


def check_rollouts(returned: Any) -> list[Rollout]:
    """Return the rollouts of one episode. Raises GarbageError unless they are a list of valid
    rollouts, with text as observations and actions and with finite rewards."""
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        raise GarbageError(f"the protocol returned {type(returned).__name__} (TypeError); it must return a list of Rollout")
    for rollout in returned:
        if not isinstance(rollout, Rollout):
            raise GarbageError(
                f"the protocol returned a list with an element of type {type(rollout).__name__}; it must be Rollout"
            )
        _check_rollout(rollout)
    return list(returned)


def _check_rollout(rollout: Rollout) -> None:
    _check_type(rollout.id, str, "the id of a rollout")
    _check_type(rollout.meta, dict, "the meta of a rollout")
    _check_type(rollout.steps, list, "the steps of a rollout")
    for step in rollout.steps:
        _check_type(step, Step, "a step of a rollout")
        _check_step(step)
    indices = [step.index for step in rollout.steps]
    if len(set(indices)) < len(indices):
        raise GarbageError(
            f"the steps of a rollout have the indices {indices}; they must be distinct, since weights are assigned by index"
        )


def _check_type(value: Any, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise GarbageError(f"{what} is of type {type(value).__name__}; it must be a {kind.__name__}")


def _check_step(step: Step) -> None:
    _check_type(step.index, int, "the index of a step")
    _check_type(step.info, dict, f"the info of step {step.index}")
    if step.trace is not None:
        _check_type(step.trace, TokenTrace, f"the trace of step {step.index}")
    texts: dict[str, object] = {"prev_obs": step.prev_obs, "action": step.action}
    if step.next_obs is not None:
        texts["next_obs"] = step.next_obs
    for name, text in texts.items():
        if not isinstance(text, str):
            raise GarbageError(f"{name} of step {step.index} is of type {type(text).__name__}; it must be text")
    if not _is_finite_number(step.reward):
        raise GarbageError(f"the reward of step {step.index} is {step.reward!r}; it must be a finite number")
    logps = None if step.trace is None else stored(step.trace, "completion_logprobs")
    if logps is not None and not _all_finite(logps):
        raise GarbageError(f"the log-probabilities of step {step.index} are not all finite")


def _all_finite(values: Any) -> bool:
    if isinstance(values, np.ndarray):
        return bool(np.isfinite(values).all())
    return math.isfinite(sum(values)) or all(map(math.isfinite, values))  # the sum is faster


def _is_finite_number(value: Any) -> bool:
    """Whether `value` is a finite number of Python, numpy or torch. Text is not a number."""
    try:
        return math.isfinite(0.0 + value)
    except (TypeError, ValueError):
        return False
