"""Converts the steps of rollouts to samples: the sampled tokens with their credit."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic.columns import Column, join_ids, mask_column, mean_or_zero
from ludic.errors import DataError
from ludic.training.group_credit import is_greedy
from ludic.training.rollouts.episodes import PlayedRollouts, is_reward, trace_columns
from ludic.training.types import TOKEN_WEIGHT, ActorTokenLogps, CreditAssigner, SampleAttachments, SampleFilter, SAWBatch, SAWItem
from ludic.types import ENVIRONMENT, TRACE_KEYS, Rollout, Step, TokenTrace, group_of, stored


def batch_from_rollouts(
    rollouts: Sequence[Rollout], credit_assigner: CreditAssigner, sample_filter: SampleFilter | None = None
) -> SAWBatch:
    """Return a batch with one sample for each step that passes the filter, and with statistics in
    its meta. `rollout.meta["engine"]["credit"]` then has the weights of the rollout's steps, for
    the log.

    Raises KeyError for a step without a weight; DataError for a weight or reward that is not
    finite, for another number of token weights than sampled tokens, and for a step without a token
    trace or without the requested log-probabilities.
    """
    weights = credit_assigner.compute(rollouts)
    items = []
    for rollout in rollouts:
        for step in rollout.steps:
            if (rollout.id, step.index) not in weights:
                raise KeyError(f"the credit assigner gave no weight for rollout {rollout.id}, step {step.index}")
            weight, columns = read_weight(weights[rollout.id, step.index], rollout, step)
            items.append(sample_from_step(rollout, step, weight))
            items[-1].attachments.token_columns.update(columns)
            if len(items) > 1:
                complete_routes(items[-2], items[-1])
    for rollout in rollouts:
        credit = [float(np.mean(weights[rollout.id, step.index])) for step in rollout.steps]
        rollout.meta["engine"] = {**(rollout.meta.get("engine") or {}), "credit": credit}
    retained = items if sample_filter is None else [item for item in items if sample_filter(item)]
    meta: dict[str, Any] = {
        "target_rollouts": len(rollouts),
        "played_rollouts": len(rollouts),
        "num_samples_before_filter": len(items),
        "num_samples": len(retained),
        "num_samples_filtered": len(items) - len(retained),
        **reward_facts(rollouts),
        "avg_completion_length": mean_or_zero([item.meta["completion_length"] for item in retained]),
        "avg_prompt_length": mean_or_zero([item.meta["prompt_length"] for item in retained]),
    }
    if grouped := group_by_environment(rollouts):
        meta[ENVIRONMENTS] = {name: environment_facts(own) for name, own in grouped.items()}
    return SAWBatch(items=retained, meta=meta)


def batch_from_played(
    played: PlayedRollouts, credit_assigner: CreditAssigner, sample_filter: SampleFilter | None = None
) -> SAWBatch:
    """`batch_from_rollouts`, with the outcomes of the episodes in its meta."""
    batch = batch_from_rollouts(played, credit_assigner, sample_filter)
    batch.meta.update(vars(played.counts), target_rollouts=played.num_requested)
    for failure in played.failures:
        if ENVIRONMENT in failure.meta:
            facts = batch.meta.setdefault(ENVIRONMENTS, {}).setdefault(failure.meta[ENVIRONMENT], environment_facts([]))
            facts["failed"] += 1
    return batch


ENVIRONMENTS = "environments"
"""Key of the `environment_facts` by name in the meta of a batch."""


def group_by_environment(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Return the rollouts of each environment by its name, and leave out rollouts of none."""
    grouped: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if ENVIRONMENT in rollout.meta:
            grouped.setdefault(rollout.meta[ENVIRONMENT], []).append(rollout)
    return grouped


def environment_facts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return what the metrics of an environment are made of: the `rewards` of its rollouts but
    greedy ones, the `lengths` of its completions, for each group of at least 2 whether all its
    rewards are equal (`flat`), and 0 `failed` episodes. Over batches, lists are joined and numbers
    added."""
    groups: dict[Any, list[float]] = {}
    for rollout in rollouts:
        groups.setdefault(group_of(rollout.meta), []).append(rollout.total_reward)
    traces = [step.trace for rollout in rollouts for step in rollout.steps if step.trace is not None]
    return {
        "rewards": [rollout.total_reward for rollout in rollouts if not is_greedy(rollout.meta)],
        "lengths": [len(stored(trace, "completion_token_ids")) for trace in traces],
        "flat": [min(group) == max(group) for group in groups.values() if len(group) > 1],
        "failed": 0,
    }


def reward_facts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return mean and population standard deviation of the rewards of all rollouts but greedy ones
    (`is_greedy`). If there are groups of at least 2, also the fraction of them in which all rewards
    are equal: in these, group-relative advantages are 0."""
    rewards = [rollout.total_reward for rollout in rollouts if not is_greedy(rollout.meta)]
    groups: dict[Any, list[float]] = {}
    for rollout in rollouts:
        group = group_of(rollout.meta)
        if group is not None:
            groups.setdefault(group, []).append(rollout.total_reward)
    facts = {"avg_total_reward": mean_or_zero(rewards), "reward_std": pstdev(rewards) if rewards else 0.0}
    larger = [group for group in groups.values() if len(group) > 1]
    if larger:
        facts["frac_reward_zero_std"] = mean_or_zero([min(group) == max(group) for group in larger])
    return facts


def sample_from_step(rollout: Rollout, step: Step, weight: float) -> SAWItem:
    """Return the sample of a step, from its sampled tokens. The meta merges the step's facts, the
    rollout's meta and the step's info; later ones take precedence.

    Example: prompt [5, 6] and completion [7] give ids [5, 6, 7] and action mask [0, 0, 1]. Of a
    trace that holds arrays they are arrays, of int32 and uint8, and so are log-probabilities: a
    batch of them is read without touching a number of Python.
    """
    trace = require_trace(rollout, step)
    prompt, completion, logps = trace_columns(trace)
    length = len(prompt) + len(completion)
    if type(prompt) is Column or type(completion) is Column:  # one of them is a list if it was read
        ids: Any = join_ids(prompt, completion)
        attention_mask: Any = mask_column(0, length)
        action_mask: Any = mask_column(len(prompt), len(completion))
    else:
        ids, attention_mask = prompt + completion, [1] * length
        action_mask = [0] * len(prompt) + [1] * len(completion)
    return SAWItem(
        input_ids=ids,
        attention_mask=attention_mask,
        action_mask=action_mask,
        weight=weight,
        meta={
            **step_facts(rollout, step),
            "completion_length": len(completion),
            "prompt_length": len(prompt),
            **rollout.meta,
            **{key: value for key, value in step.info.items() if key not in TRACE_KEYS},
        },
        attachments=SampleAttachments(
            actor_logps=None if logps is None else ActorTokenLogps(logps), candidates=trace.candidates, routes=trace.routes
        ),
        images=trace.images,
    )


def complete_routes(turn: SAWItem, later: SAWItem) -> None:
    """Give the last sampled token of a turn the experts that a later turn, which begins with all of
    it, has for it: only the later one passes it through the model. They can then share a row."""
    known, longer = turn.attachments.routes, later.attachments.routes
    ids, others = (np.asarray(stored(item, "input_ids")) for item in (turn, later))
    if known is None or longer is None or len(others) <= len(ids) or not np.array_equal(others[: len(ids)], ids):
        return
    if longer.data.startswith(known.data):
        turn.attachments.routes = longer.cut(len(ids))


def step_facts(rollout: Rollout, step: Step) -> dict[str, Any]:
    """Return the facts about a step that the meta of samples and evaluation records have."""
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


def require_trace(rollout: Rollout, step: Step) -> TokenTrace:
    """Return the step's token trace. Raises DataError for a step that cannot be trained on: without
    tokens, without the requested log-probabilities, or with a reward that is not finite."""
    where = f"rollout {rollout.id}, step {step.index}"
    if not is_reward(step.reward):
        raise DataError(f"the reward of {where} is {step.reward}; rewards must be finite numbers of float32")
    if step.trace is None:
        raise DataError(f"Missing rollout-time token trace: {where}; sample with ReturnSpec.for_rl()")
    requested = rollout.meta.get("engine", {}).get("return_spec", {}).get("return_chosen_logprobs", False)
    if requested and stored(step.trace, "completion_logprobs") is None:
        raise DataError(f"{where} has no log-probabilities although they were requested; check that the server returns them")
    return step.trace


def read_weight(weight: float | NDArray[Any], rollout: Rollout, step: Step) -> tuple[float, dict[str, NDArray[np.float64]]]:
    """Return the weight of a step's sample and its token columns: of [A] weights of the sampled
    tokens their mean, and the column `token_weight`. Raises DataError unless all are finite, and
    for another number of them than the step has sampled tokens."""
    values, where = np.asarray(weight, dtype=np.float64), f"rollout {rollout.id}, step {step.index}"
    if not np.isfinite(values).all():
        raise DataError(f"the weight of {where} is {values[~np.isfinite(values)].flat[0]}; weights must be finite")
    if not values.ndim:
        return float(values), {}
    tokens = len(values) if step.trace is None else len(stored(step.trace, "completion_token_ids"))
    if values.shape != (tokens,):
        raise DataError(
            f"{where} has weights of shape {list(values.shape)} for {tokens} sampled tokens; give one each, or a float"
        )
    return float(values.mean()) if tokens else 0.0, {TOKEN_WEIGHT: values}
