"""Batches of samples without concurrency: prompts, one call, rewards, filter, batch. And the pure
functions that make a batch of samples."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ludic.errors import ConfigTypeError, DataError, RequestsExhausted, RolloutError
from ludic.rollouts.training.rollout_gen.generate_calls import (
    GenerateCalls,
    check_reward_function,
    is_coroutine_function,
    name_of_function,
    to_reward,
)
from ludic.rollouts.training.samples import check_sample
from ludic.rollouts.training.types import RolloutBatch, RolloutConfig, Sample
from ludic.training.rollouts.group_filters import name_of_filter
from ludic.training.rollouts.member_calls import seed_of_member

logger = logging.getLogger(__name__)


class PromptBuffer(Protocol):
    """What gives prompts; `DataBuffer` does."""

    def get_prompts(self, n: int) -> list[Any]:
        """The next `n` prompts; fewer at the end. Raises RequestsExhausted after it."""
        ...


def generate_rollout_batches(data_buffer: PromptBuffer, config: RolloutConfig, **rollout_kwargs: Any) -> Iterator[RolloutBatch]:
    """Batches without end, or until the buffer is exhausted.

    Each takes `batch_size` prompts and calls `generate_fn` once, with every prompt repeated
    `n_samples_per_prompt` times: `[p0, p0, p1, p1]`. Samples are rewarded, then filtered by group.
    Refused groups are not replaced, so a batch may be short; one that would be empty is left out,
    and after `patience` of them in a row there is a RolloutError. Nothing is over-sampled, and
    nothing runs at the same time: `AsyncRolloutManager` does both.

    Raises ConfigTypeError if `generate_fn` or `reward_fn` is a coroutine function.
    """
    for function in (config.generate_fn, config.reward_fn):
        if function is not None and is_coroutine_function(function):
            _refuse_coroutine(function)
    if config.over_sampling_factor > 1:
        logger.warning("over_sampling_factor has no effect on generate_rollout_batches; AsyncRolloutManager over-samples")
    return _generate_batches(data_buffer, config, GenerateCalls(config.generate_fn, rollout_kwargs))


def _generate_batches(data_buffer: PromptBuffer, config: RolloutConfig, calls: GenerateCalls) -> Iterator[RolloutBatch]:
    step, ordinal, empty = 0, 0, 0
    while True:
        epoch = epoch_of(data_buffer)
        try:
            prompts = data_buffer.get_prompts(config.batch_size)
        except RequestsExhausted:
            return
        samples = apply_sample_transforms(_generate(calls, config, prompts, ordinal), config)
        ordinal += len(prompts)
        empty = 0 if samples else empty + 1
        if empty >= config.patience:
            raise RolloutError(
                f"{_name_filter(config)} refused all groups of {empty} batches in a row; relax the filter, use prompts of other "
                "difficulty, or raise patience"
            )
        if samples:
            yield convert_to_batch(samples, epoch_id=epoch, step_id=step)
            step += 1


def _generate(calls: GenerateCalls, config: RolloutConfig, prompts: Sequence[Any], first: int) -> list[Sample]:
    """One sample for each prompt and repetition; the groups are numbered from `first` on."""
    n = config.n_samples_per_prompt
    repeated = [prompt for prompt in prompts for _ in range(n)]
    seeds = [seed_of_member(config.seed, first + i // n, i % n) for i in range(len(repeated))]
    answer = calls(repeated, seeds=seeds)
    if inspect.isawaitable(answer):
        _refuse_coroutine(config.generate_fn, answer)
    samples = calls.check(answer, repeated)
    for i, sample in enumerate(samples):
        sample.group_index, sample.index = first + i // n, first * n + i
    return samples


def epoch_of(data_buffer: Any) -> int:
    """The epoch of a buffer; 0 for one that does not count them."""
    return int(getattr(data_buffer, "epoch_id", 0))


def apply_sample_transforms(samples: Sequence[Sample], config: RolloutConfig) -> list[Sample]:
    """The samples of the groups that `filter_fn` accepts, after `reward_fn` has rewarded each
    sample. A group is the samples of one `group_index`, or if they have none,
    `n_samples_per_prompt` consecutive ones."""
    check_reward_function(config.reward_fn)
    if config.reward_fn is not None:
        for sample in samples:
            reward = config.reward_fn(sample)
            if inspect.isawaitable(reward):
                _refuse_coroutine(config.reward_fn, reward)
            sample.reward = to_reward(reward, name_of_function(config.reward_fn))
    if config.filter_fn is None:
        return list(samples)
    groups: dict[tuple[bool, int], list[Sample]] = {}
    for place, sample in enumerate(samples):
        has_group = sample.group_index is not None
        key = sample.group_index if sample.group_index is not None else place // config.n_samples_per_prompt
        groups.setdefault((has_group, key), []).append(sample)
    return [sample for group in groups.values() if is_accepted(group, config) for sample in group]


def is_accepted(group: list[Sample], config: RolloutConfig) -> bool:
    """Whether the filter accepts the group. Raises ConfigTypeError for a coroutine function."""
    if config.filter_fn is None:
        return True
    answer: Any = config.filter_fn(group)
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise ConfigTypeError(
            f"{_name_filter(config)} is a coroutine function; a filter is a plain function of the samples of one prompt, since it must "
            "judge a group at once. Slow judgements belong into reward_fn"
        )
    return bool(answer)


def _name_filter(config: RolloutConfig) -> str:
    return "no filter" if config.filter_fn is None else name_of_filter(config.filter_fn)


def _refuse_coroutine(function: Any, answer: Any = None) -> None:
    if inspect.iscoroutine(answer):
        answer.close()
    raise ConfigTypeError(
        f"{name_of_function(function)} is a coroutine function, which generate_rollout_batches cannot await; use AsyncRolloutManager, or "
        "a plain function"
    )


def convert_to_batch(samples: Sequence[Sample], epoch_id: int = 0, step_id: int = 0) -> RolloutBatch:
    """The samples as columns. Raises DataError for an empty list, and for a sample whose lengths,
    mask or reward are wrong."""
    if not samples:
        raise DataError("a batch needs at least one sample; the filter may have refused every group")
    for place, sample in enumerate(samples):
        check_sample(sample, place)
    tokens, masks, rewards = extract_sample_fields(samples)
    metadata = build_batch_metadata(samples, epoch_id, step_id)
    return RolloutBatch(tokens, masks, rewards, compute_response_lengths(masks), metadata, list(samples))


def extract_sample_fields(samples: Sequence[Sample]) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """(tokens, loss masks, rewards), a row or a number for each sample."""
    return (
        [list(sample.tokens) for sample in samples],
        [[float(value) for value in sample.loss_mask] for sample in samples],
        [float(sample.reward) for sample in samples],
    )


def compute_response_lengths(loss_masks: Sequence[Sequence[float]]) -> list[int]:
    """The number of tokens with a mask above 0, of each row. Example: 0 0 1 0.5 has 2."""
    return [sum(value > 0 for value in mask) for mask in loss_masks]


def build_batch_metadata(samples: Sequence[Sample], epoch_id: int, step_id: int) -> dict[str, Any]:
    """`epoch_id`, `step_id`, `batch_size` (samples), `prompts`, `responses`, and for each key of
    any sample's metadata a list `sample_<key>`, None where a sample lacks it."""
    keys = dict.fromkeys(key for sample in samples for key in sample.metadata)
    return {
        "epoch_id": epoch_id,
        "step_id": step_id,
        "batch_size": len(samples),
        "prompts": [sample.prompt for sample in samples],
        "responses": [sample.response for sample in samples],
        **{f"sample_{key}": [sample.metadata.get(key) for sample in samples] for key in keys},
    }
