"""Batches of samples without concurrency: prompts, one call, rewards, filter, batch. And the pure
functions that make a batch of samples."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ludic.errors import ConfigError, ConfigTypeError, DataError, LudicError, RequestsExhausted, RolloutError
from ludic.event_loop import describe_error
from ludic.rollouts.training.samples import check_sample
from ludic.rollouts.training.types import RolloutBatch, RolloutConfig, Sample
from ludic.training.reward_functions import is_coroutine_function
from ludic.training.rollouts.group_filters import name_of_filter
from ludic.training.rollouts.member_calls import seed_of_member

logger = logging.getLogger(__name__)


def generate_rollout_batches(data_buffer: Any, config: RolloutConfig, **rollout_kwargs: Any) -> Iterator[RolloutBatch]:
    """Batches without end, or until the buffer is exhausted: a `DataBuffer`, or an object with
    `get_prompts(n)`, which returns the next prompts and raises RequestsExhausted after the last.

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


def _generate_batches(data_buffer: Any, config: RolloutConfig, calls: GenerateCalls) -> Iterator[RolloutBatch]:
    n, step, ordinal, empty = config.n_samples_per_prompt, 0, 0, 0
    while True:
        epoch = epoch_of(data_buffer)
        try:
            prompts = data_buffer.get_prompts(config.batch_size)
        except RequestsExhausted:
            return
        repeated = [prompt for prompt in prompts for _ in range(n)]
        seeds = [seed_of_member(config.seed, ordinal + i // n, i % n) for i in range(len(repeated))]
        answer = calls(repeated, seeds=seeds)
        if inspect.isawaitable(answer):
            _refuse_coroutine(config.generate_fn, answer)
        samples = calls.check(answer, repeated)
        for i, sample in enumerate(samples):
            sample.group_index, sample.index = ordinal + i // n, ordinal * n + i
        samples = apply_sample_transforms(samples, config)
        ordinal += len(prompts)
        empty = 0 if samples else empty + 1
        if empty >= config.patience:
            name = "no filter" if config.filter_fn is None else name_of_filter(config.filter_fn)
            raise RolloutError(f"{name} refused all groups of {empty} batches in a row; relax the filter, or raise patience")
        if samples:
            yield convert_to_batch(samples, epoch_id=epoch, step_id=step)
            step += 1


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
        raise ConfigTypeError(f"{name_of_filter(config.filter_fn)} is a coroutine function; a filter must be a plain function")
    return bool(answer)


def _refuse_coroutine(function: Any, answer: Any = None) -> None:
    if inspect.iscoroutine(answer):
        answer.close()
    raise ConfigTypeError(f"{name_of_function(function)} is a coroutine function; use AsyncRolloutManager, or a plain function")


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


OFFERED = ("seeds", "partial", "weight_version")
"""Arguments that are passed where the signature names them."""


class GenerateCalls:
    """A `generate_fn` with the arguments of every call. Raises ConfigTypeError unless it can be
    called with a list of prompts and `rollout_kwargs`."""

    def __init__(self, generate_fn: Callable[..., Any], rollout_kwargs: Mapping[str, Any]) -> None:
        self._generate, self._rollout_kwargs = generate_fn, dict(rollout_kwargs)
        self.name = name_of_function(generate_fn)
        try:
            signature = inspect.signature(generate_fn)
        except (TypeError, ValueError):  # of functions that do not tell, such as some of C
            signature = None
        named = () if signature is None else signature.parameters
        self._takes = {name for name in OFFERED if name in named and name not in self._rollout_kwargs}
        self.takes_partial = "partial" in self._takes
        """Whether the function can go on with a sample that was interrupted."""
        try:
            if signature is not None:
                signature.bind([], **self._rollout_kwargs, **dict.fromkeys(self._takes))
        except TypeError as error:
            arguments = "".join(f", {name}=" for name in self._rollout_kwargs)
            raise ConfigTypeError(f"{self.name}{signature} must take a list of prompts{arguments}: {error}") from error

    def __call__(self, prompts: Sequence[Any], *, seeds: Sequence[int], partial: Any = None, weight_version: int = 0) -> Any:
        """The result of the function, not awaited."""
        offered = {"seeds": list(seeds), "partial": partial, "weight_version": weight_version}
        return self._generate(list(prompts), **self._rollout_kwargs, **{name: offered[name] for name in self._takes})

    def check(self, samples: Any, prompts: Sequence[Any]) -> list[Sample]:
        """The samples, if there is one for each prompt. Raises DataError if not."""
        if not isinstance(samples, Sequence) or isinstance(samples, str):
            raise DataError(f"{self.name} returned {_describe(samples)}; it must return a list with one Sample for each prompt")
        strange = next((sample for sample in samples if not isinstance(sample, Sample)), None)
        if strange is not None:
            raise DataError(f"{self.name} returned a list with {_describe(strange)}; every element must be a Sample")
        if len(samples) != len(prompts):
            raise DataError(f"{self.name} returned {len(samples)} samples for {len(prompts)} prompts; return one for each")
        return list(samples)


def name_of_function(function: Callable[..., Any]) -> str:
    """Its name for messages."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def check_reward_function(reward_fn: Any) -> None:
    """Raise ConfigTypeError unless it is a function, such as for a coroutine."""
    if reward_fn is not None and not callable(reward_fn):
        if inspect.iscoroutine(reward_fn):
            reward_fn.close()
        raise ConfigTypeError(f"reward_fn must be a function of a Sample, not {_describe(reward_fn)}; pass it without calling it")


def to_reward(value: Any, name: str) -> float:
    """The number that a reward function returned. Raises ConfigError for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} returned {_describe(value)}; a reward function must return a number") from error


def _describe(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


class BufferedPrompts:
    """Takes prompts from a `DataBuffer`, or from a buffer of the user's own with `get_prompts`,
    `save_state` and `load_state`. If it has `position` and `at` too, prompts are found again by
    their position, and need not be in a saved state."""

    def __init__(self, data_buffer: Any) -> None:
        missing = [name for name in ("get_prompts", "save_state", "load_state") if not hasattr(data_buffer, name)]
        if missing:
            raise ConfigTypeError(f"data_buffer ({type(data_buffer).__name__}) must have {' and '.join(missing)}; use DataBuffer")
        self.buffer = data_buffer
        self.can_find = hasattr(data_buffer, "at") and hasattr(data_buffer, "position")
        """Whether `at` works."""
        self._taken = 0

    def take(self) -> tuple[int, Any]:
        """The next (position, prompt). Raises RequestsExhausted after the last one."""
        position = self.buffer.position if self.can_find else self._taken
        prompts = self.buffer.get_prompts(1)
        if not prompts:
            raise RequestsExhausted("the buffer gave no prompt")
        if not isinstance(prompts, list | tuple) or len(prompts) != 1:
            raise DataError(f"get_prompts(1) of {type(self.buffer).__name__} must return a list of one prompt, not {prompts!r}")
        self._taken += 1
        return position, prompts[0]

    def at(self, position: int) -> Any:
        """The prompt at a position that was taken, in this process or before it."""
        return self.buffer.at(position)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state of the buffer. Raises ConfigError for one that it cannot read."""
        try:
            self.buffer.load_state(state)
        except LudicError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(self.buffer).__name__} cannot load buffer_state ({describe_error(error)}); give the buffer that saved it"
            ) from error


def copy_prompt(prompt: Any) -> Any:
    """A copy that the caller may append messages to or write keys into. Texts, and anything that is
    neither a list nor a mapping, stay as they are."""
    if isinstance(prompt, dict):
        return dict(prompt)
    return [dict(part) if isinstance(part, dict) else part for part in prompt] if isinstance(prompt, list) else prompt
