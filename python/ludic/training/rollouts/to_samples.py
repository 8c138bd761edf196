"""Turns the steps of rollouts into samples: the tokens that were sampled, with the credit they
earned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import pstdev
from typing import Any

from ludic.errors import DataError
from ludic.training.averages import mean_or_zero
from ludic.training.types import (
    ActorTokenLogps,
    CreditAssigner,
    RolloutStepKey,
    SampleAttachments,
    SampleFilter,
    SAWBatch,
    SAWItem,
)
from ludic.types import TRACE_KEYS, Rollout, Step, TokenTrace, group_of


def batch_from_rollouts(
    rollouts: Sequence[Rollout], credit_assigner: CreditAssigner, sample_filter: SampleFilter | None = None
) -> SAWBatch:
    """One sample for each step, filtered, and what is true of the batch as a whole.

    Raises KeyError for a step without a weight, DataError for a weight or reward that is not
    finite, a step without a token trace, or one without the log-probabilities that were asked for.
    """
    weights = credit_assigner.compute(rollouts)
    items = [sample_from_step(rollout, step, _weight(weights, rollout, step)) for rollout in rollouts for step in rollout.steps]
    kept = items if sample_filter is None else [item for item in items if sample_filter(item)]
    meta = {
        "target_rollouts": len(rollouts),
        "played_rollouts": len(rollouts),
        "num_samples_before_filter": len(items),
        "num_samples": len(kept),
        "num_samples_filtered": len(items) - len(kept),
        **reward_facts(rollouts),
        "avg_completion_length": mean_or_zero([item.meta["completion_length"] for item in kept]),
        "avg_prompt_length": mean_or_zero([item.meta["prompt_length"] for item in kept]),
    }
    return SAWBatch(items=kept, meta=meta)


def reward_facts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean and population standard deviation of the rewards of all rollouts; where there are
    groups of several, also the share of them whose members all earned the same, which
    group-relative credit learns nothing from."""
    rewards = [rollout.total_reward for rollout in rollouts]
    groups: dict[Any, list[float]] = {}
    for rollout in rollouts:
        group = group_of(rollout.meta)
        if group is not None:
            groups.setdefault(group, []).append(rollout.total_reward)
    facts = {"avg_total_reward": mean_or_zero(rewards), "reward_std": pstdev(rewards) if rewards else 0.0}
    several = [group for group in groups.values() if len(group) > 1]
    if several:
        facts["frac_reward_zero_std"] = mean_or_zero([min(group) == max(group) for group in several])
    return facts


def sample_from_step(rollout: Rollout, step: Step, weight: float) -> SAWItem:
    """Prompt and completion as they were sampled. Meta: the step's facts, then the rollout's,
    then the step's info."""
    trace = trace_of(rollout, step)
    prompt, completion = trace.prompt_token_ids, trace.completion_token_ids
    length = len(prompt) + len(completion)
    logps = trace.completion_logprobs
    return SAWItem(
        input_ids=prompt + completion,
        attention_mask=[1] * length,
        action_mask=[0] * len(prompt) + [1] * len(completion),
        weight=weight,
        meta={
            **step_facts(rollout, step),
            "completion_length": len(completion),
            "prompt_length": len(prompt),
            **rollout.meta,
            **{key: value for key, value in step.info.items() if key not in TRACE_KEYS},
        },
        attachments=SampleAttachments(actor_logps=None if logps is None else ActorTokenLogps(logps)),
    )


def step_facts(rollout: Rollout, step: Step) -> dict[str, Any]:
    """What samples and evaluation records say of a step, before the rollout's meta and the
    step's info."""
    return {
        "rollout_id": rollout.id,
        "step_index": step.index,
        "reward": step.reward,
        "prev_obs": step.prev_obs,
        "action": step.action,
        "total_reward": rollout.total_reward,
        "truncated": step.truncated,
        "terminated": step.terminated,
    }


def trace_of(rollout: Rollout, step: Step) -> TokenTrace:
    """The step's tokens. Raises DataError for a step that cannot be trained on: without them,
    without the log-probabilities that were asked for, or with a reward that is not finite."""
    where = f"rollout {rollout.id}, step {step.index}"
    if not math.isfinite(step.reward):
        raise DataError(f"the reward of {where} is {step.reward}; rewards must be finite")
    if step.trace is None:
        raise DataError(
            f"Missing rollout-time token trace: {where}; sample with ReturnSpec.for_rl() so that token ids come back with the text"
        )
    asked = rollout.meta.get("engine", {}).get("return_spec", {}).get("return_chosen_logprobs", False)
    if asked and step.trace.completion_logprobs is None:
        raise DataError(f"{where} has no log-probabilities though they were asked for; check that the server returns them")
    return step.trace


def _weight(weights: Mapping[RolloutStepKey, float], rollout: Rollout, step: Step) -> float:
    key = (rollout.id, step.index)
    if key not in weights:
        raise KeyError(f"the credit assigner gave no weight for rollout {rollout.id}, step {step.index}")
    weight = float(weights[key])
    if not math.isfinite(weight):
        raise DataError(f"the weight of rollout {rollout.id}, step {step.index} is {weight}; weights must be finite")
    return weight
