"""Checks what samplers, queues and servers hand to training: rollouts, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ludic.columns import LARGEST, find_token_fault
from ludic.errors import DataError, RolloutError
from ludic.list_fields import stored
from ludic.types import Rollout, Step, TokenTrace

MAX_LATER_VERSIONS = 10_000
"""How much newer than the weights a sample may be. A trainer that went back to a checkpoint meets
samples of weights that it had after it."""


class GarbageError(RolloutError, DataError):
    """An episode returned invalid rollouts; it counts as failed."""


@dataclass
class SampleCheck:
    """What the model in hand can be trained on. A trainer makes one and hands it to its source
    (`BatchSourceBase.use_check`), so that whatever is wrong is refused where it comes in."""

    vocab_size: int | None = None
    """Rows of the model's embedding; None if it is not known, as in an actor."""
    version: int | None = None
    """Version of the weights, that is the trainer's step; None if it is not known."""

    def find_fault(self, meta: Mapping[str, Any], ids: Any = None, logps: Any = None) -> str | None:
        """Why the `policy_version` in `meta`, or the ids [T] of a sample and the log-probabilities
        [A] of some of them cannot be trained on; None if nothing is wrong."""
        version, newest = meta.get("policy_version"), 2**31 - 1 if self.version is None else self.version + MAX_LATER_VERSIONS
        if version is not None and not (isinstance(version, int | np.integer) and 0 <= version <= newest):
            return f"policy_version {version!r}; it must be a whole number from 0 to {newest}"
        if ids is None:
            return None
        return find_token_fault(ids, logps, self.vocab_size) if len(ids) else "no tokens"

    def find_step_fault(self, rollout: Rollout, step: Step) -> str | None:
        """The same for a step of a rollout."""
        fault = self.find_fault(rollout.meta)
        if step.trace is None:
            return fault or self.find_fault(step.info)
        prompt, completion, logps = trace_columns(step.trace)
        fault = fault or self.find_fault(step.info, prompt if len(prompt) else completion)
        return fault or find_token_fault(completion, logps, self.vocab_size)


def check_rollouts(returned: Any, check: SampleCheck | None = None) -> list[Rollout]:
    """Return the rollouts of one episode. Raises GarbageError unless they are a list of valid
    rollouts, with text as observations and actions, finite rewards, and tokens that pass
    `check`."""
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        raise GarbageError(f"the protocol returned {type(returned).__name__} (TypeError); it must return a list of Rollout")
    for rollout in returned:
        if not isinstance(rollout, Rollout):
            raise GarbageError(
                f"the protocol returned a list with an element of type {type(rollout).__name__}; it must be Rollout"
            )
        _check_rollout(rollout, check or SampleCheck())
    return list(returned)


def _check_rollout(rollout: Rollout, check: SampleCheck) -> None:
    _check_type(rollout.id, str, "the id of a rollout")
    _check_type(rollout.meta, dict, "the meta of a rollout")
    _check_type(rollout.steps, list, "the steps of a rollout")
    for step in rollout.steps:
        _check_type(step, Step, "a step of a rollout")
        _check_step(step)
        if fault := check.find_step_fault(rollout, step):
            raise GarbageError(f"step {step.index} of rollout {rollout.id} has {fault}")
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
    if not is_reward(step.reward):
        raise GarbageError(f"the reward of step {step.index} is {step.reward!r}; it must be a finite number of float32")


def trace_columns(trace: TokenTrace) -> tuple[Any, Any, Any]:
    """Ids of the prompt [P] and the completion [C], and log-probabilities [C] or None, as the trace
    holds them: arrays or lists."""
    names = ("prompt_token_ids", "completion_token_ids", "completion_logprobs")
    prompt, completion, logps = (stored(trace, name) for name in names)
    return prompt, completion, logps


def is_reward(value: Any) -> bool:
    """Whether `value` is a number of Python, numpy or torch that float32 holds. Text is not a
    number."""
    try:
        return bool(abs(0.0 + value) <= LARGEST)
    except (TypeError, ValueError):
        return False
