"""Converts samples to trained items, and rollouts to samples and back.

    Sample(tokens=[5, 6, 7, 8, 9], loss_mask=[0, 0, 1, 0, 1])
        item_of_sample       one `SAWItem`: the action mask is the loss mask, where that is not 0;
                             fractions are the item's `action_fractions`
        rollout_of_sample    a `Rollout` of two steps: 5 6 -> 7, and 5 6 7 8 -> 9

This is where lengths, masks, rewards and log-probabilities are checked. Errors name the sample by
its `index`, or by its place in the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ludic.columns import mean_or_zero
from ludic.errors import DataError, shorten_names
from ludic.images.content import show_content
from ludic.rollouts.training.types import Sample, SampleStatus
from ludic.training.rollouts.episodes import is_reward
from ludic.training.rollouts.to_samples import read_weight, reward_facts
from ludic.training.types import ActorTokenLogps, CreditAssigner, SampleAttachments, SAWBatch, SAWItem
from ludic.types import Rollout, Step, TokenTrace, group_of, is_list_of

LARGEST_MASK = float(np.finfo(np.float32).max)


def check_sample(sample: Sample, place: int = 0) -> None:
    """Raise DataError unless tokens, mask and log-probabilities fit together and mask and reward
    are finite numbers. A sample without tokens, only text, is accepted."""
    where = name_sample(sample, place)
    tokens, mask, logps = sample.tokens, sample.loss_mask, sample.rollout_log_probs
    numbers = {"loss_mask": mask, **({} if logps is None else {"rollout_log_probs": logps})}
    if not is_list_of(tokens, int):
        raise DataError(f"the tokens of {where} must be a list of whole numbers; arrays and tensors become one with .tolist()")
    for name, values in numbers.items():
        if not is_list_of(values, int, float):
            raise DataError(f"the {name} of {where} must be a list of numbers; arrays and tensors become one with .tolist()")
    if len(tokens) != len(mask):
        raise DataError(f"{where} has {len(tokens)} tokens and a loss_mask of {len(mask)}; both must cover prompt and response")
    wrong = next((value for value in set(mask) if not 0 <= value <= LARGEST_MASK), None)
    if wrong is not None:
        raise DataError(f"the loss_mask of {where} has the value {wrong}; 0 is no loss on a token, 1 is loss, 0.5 is half of it")
    if not is_reward(sample.reward):
        raise DataError(f"the reward of {where} is {sample.reward!r}; rewards must be finite numbers")
    if logps is not None and len(logps) != len(mask):
        trained = sum(value > 0 for value in mask)
        remedy = "put 0 in the place of each token with mask 0" if len(logps) == trained else "give one for each token"
        raise DataError(f"{where} has {len(logps)} rollout_log_probs for {len(mask)} tokens; {remedy}")


def check_sampled_logps(samples: Sequence[Sample], loss: str) -> None:
    """Raise DataError, which names the samples, if any has no `rollout_log_probs`. `loss` is the
    name of what needs them."""
    missing = [name_sample(sample, place) for place, sample in enumerate(samples) if sample.rollout_log_probs is None]
    if missing:
        which = f"{len(missing)} of {len(samples)} samples ({shorten_names(missing, limit=3)})"
        raise DataError(f"{which} have no rollout_log_probs for {loss}; set one for each token in generate_fn, or use grpo_loss")


def name_sample(sample: Sample, place: int) -> str:
    """`sample 7`: its index, or its place in the list if it has none."""
    return f"sample {place if sample.index is None else sample.index}"


def item_of_sample(sample: Sample, *, weight: float = 1.0, place: int = 0) -> SAWItem:
    """The sample as it is trained, with the credit `weight`. Raises DataError for a sample that
    `check_sample` refuses, or without a token to train on."""
    check_sample(sample, place)
    where, tokens = name_sample(sample, place), sample.tokens
    # A mask as the trainer takes it: 1 where it is not 0, and the values there unless all are 1. In
    # float32, as a loss computes. Example: [0, 0.5, 1] is [0, 1, 1] and [0.5, 1].
    values = np.asarray(sample.loss_mask, dtype=np.float32)
    mask: list[int] = (values != 0).astype(int).tolist()
    fractions: list[float] | None = None if set(sample.loss_mask) <= {0, 1} else values[values != 0].tolist()
    num_actions = sum(mask)
    if not num_actions:
        raise DataError(f"{where} has no token to train on; tokens and loss_mask must have the response with mask 1")
    logps = sample.rollout_log_probs
    actor_logps = None if logps is None else ActorTokenLogps([float(p) for p, m in zip(logps, mask, strict=True) if m])
    return SAWItem(
        input_ids=list(tokens),
        attention_mask=[1] * len(tokens),
        action_mask=mask,
        weight=weight,
        meta={
            **_meta_of(sample, where),
            "step_index": 0,
            "reward": float(sample.reward),
            "total_reward": float(sample.reward),
            "action": sample.response,
            "truncated": sample.status is SampleStatus.TRUNCATED,
            "terminated": sample.status is SampleStatus.COMPLETED,
            "completion_length": num_actions,
            "prompt_length": len(tokens) - num_actions,
        },
        attachments=SampleAttachments(actor_logps=actor_logps, action_fractions=fractions),
    )


def _meta_of(sample: Sample, where: str) -> dict[str, Any]:
    """The metadata, with the names under which the trainer knows group and version."""
    meta: dict[str, Any] = {**sample.metadata, "rollout_id": where}
    if sample.group_index is not None:
        meta["request_meta"] = {"group_id": sample.group_index}
    version = sample.metadata.get("weight_version")
    if isinstance(version, int):
        meta["policy_version"] = version
    return meta


def batch_of_samples(samples: Sequence[Sample], credit_assigner: CreditAssigner) -> SAWBatch:
    """The samples with their credit. One sample is one item, however many turns it has; for credit
    it is an episode of one step."""
    items = [item_of_sample(sample, place=place) for place, sample in enumerate(samples)]
    if len({item.meta["rollout_id"] for item in items}) < len(items):  # indices that are used twice
        for place, item in enumerate(items):
            item.meta["rollout_id"] = f"sample {place}"
    rollouts = []
    for sample, item in zip(samples, items, strict=True):  # as one step: what the credit of a whole episode depends on
        said = [token for token, m in zip(item.input_ids, item.action_mask, strict=True) if m]
        shown = [token for token, m in zip(item.input_ids, item.action_mask, strict=True) if not m]
        step = _make_step(sample, 0, TokenTrace(shown, said), is_last=True)
        rollouts.append(Rollout(id=item.meta["rollout_id"], steps=[step], meta=item.meta))
    weights = credit_assigner.compute(rollouts)
    for item, rollout in zip(items, rollouts, strict=True):
        item.weight, columns = read_weight(weights[rollout.id, 0], rollout, rollout.steps[0])
        item.attachments.token_columns.update(columns)
    meta = {
        "target_rollouts": len(rollouts),
        "played_rollouts": len(rollouts),
        "num_samples": len(items),
        **reward_facts(rollouts),
        "avg_completion_length": mean_or_zero([item.meta["completion_length"] for item in items]),
        "avg_prompt_length": mean_or_zero([item.meta["prompt_length"] for item in items]),
    }
    return SAWBatch(items, meta)


def rollout_of_sample(sample: Sample, *, place: int = 0) -> Rollout:
    """The sample as an episode: one step for each run of tokens with mask 1, whose prompt is all
    that comes before it. The last step has the reward. Example: mask 0 0 1 0 1 has two steps, with
    prompts of 2 and 4 tokens."""
    item = item_of_sample(sample, place=place)
    if item.attachments.action_fractions is not None:
        raise DataError(f"the loss_mask of {item.meta['rollout_id']} has fractions, which an episode cannot have; round them")
    borders = [0, *(i for i, (a, b) in enumerate(pairwise(item.action_mask), 1) if a != b), len(item.action_mask)]
    runs = [(start, end) for start, end in pairwise(borders) if item.action_mask[start]]
    logps = sample.rollout_log_probs
    steps = []
    for index, (start, end) in enumerate(runs):
        said = None if logps is None else [float(logp) for logp in logps[start:end]]
        trace = TokenTrace(sample.tokens[:start], sample.tokens[start:end], said)
        steps.append(_make_step(sample, index, trace, is_last=index == len(runs) - 1))
    return Rollout(id=item.meta["rollout_id"], steps=steps, meta=_meta_of(sample, item.meta["rollout_id"]))


def _make_step(sample: Sample, index: int, trace: TokenTrace, *, is_last: bool) -> Step:
    prompt = sample.prompt if isinstance(sample.prompt, str) else ""
    return Step(
        index,
        prompt if index == 0 else "",
        sample.response if is_last else "",
        None,
        float(sample.reward) if is_last else 0.0,
        is_last and sample.status is SampleStatus.TRUNCATED,
        is_last and sample.status is SampleStatus.COMPLETED,
        trace=trace,
    )


def sample_of_rollout(rollout: Rollout) -> Sample:
    """The episode as one sample: the tokens of the last step, with mask 1 on what the model said in
    any step. Raises DataError if a step has no token trace, or does not go on with the tokens of
    the step before, as with a context that leaves out earlier turns."""
    if not rollout.steps:
        raise DataError(f"rollout {rollout.id} has no steps; an episode that failed is no sample")
    tokens: list[int] = []
    mask: list[float] = []
    logps: list[float] | None = []
    for step in rollout.steps:
        trace = step.trace
        if trace is None:
            raise DataError(f"step {step.index} of rollout {rollout.id} has no token trace; sample with ReturnSpec.for_rl()")
        if trace.images:
            raise DataError(
                f"step {step.index} of rollout {rollout.id} has images, which a Sample cannot have; train the rollouts"
            )
        prompt, said = trace.prompt_token_ids, trace.completion_token_ids
        if prompt[: len(tokens)] != tokens:
            raise DataError(f"step {step.index} of rollout {rollout.id} must extend the steps before; keep all turns in context")
        shown = len(prompt) - len(tokens)
        tokens, mask = [*prompt, *said], [*mask, *[0.0] * shown, *[1.0] * len(said)]
        of_step = trace.completion_logprobs
        logps = None if logps is None or of_step is None else [*logps, *[0.0] * shown, *of_step]
    last = rollout.steps[-1]
    group = group_of(rollout.meta)
    return Sample(
        prompt=show_content(rollout.steps[0].prev_obs),
        response="\n".join(step.action for step in rollout.steps),
        tokens=tokens,
        loss_mask=mask,
        reward=rollout.total_reward,
        group_index=group if isinstance(group, int) else None,
        metadata={**rollout.meta, "rollout_id": rollout.id},
        rollout_log_probs=logps,
        status=SampleStatus.COMPLETED if last.terminated else SampleStatus.TRUNCATED,
    )
