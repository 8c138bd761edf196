"""The data types of `rollouts.training`: samples, batches, configurations, futures.

A worked example: the prompt `2+2=` (ids 53 46 53 64) and the sampled answer `4<eos>` (ids 55 2).

    Sample(
        prompt="2+2=",
        response="4",
        tokens=[53, 46, 53, 64, 55, 2],             # prompt, then response: T = 6
        loss_mask=[0, 0, 0, 0, 1, 1],               # 1 on what the model said
        reward=1.0,
        rollout_log_probs=[0, 0, 0, 0, -0.2, -0.1],
    )

A sample is what a `generate_fn` returns: text, tokens and reward, before credit. The trainer takes
an `SAWItem`; `samples` converts one to the other and checks lengths, masks and rewards. Building a
sample or a batch checks nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal, TypeVar, get_args

from ludic.errors import ConfigError, ConfigTypeError, DataError, check_value, did_you_mean
from ludic.event_loop import ImmediateTrainFuture as ImmediateTrainFuture, TrainFuture as TrainFuture
from ludic.rollouts.training.packed_columns import pack_columns, unpack_columns
from ludic.training.rollouts.batch_selection import choose_max_lag
from ludic.training.rollouts.group_filters import COMPARING, name_of_filter
from ludic.types import Message

logger = logging.getLogger(__name__)

Prompt = str | list[Message]
"""Text, or a list of messages `{"role": ..., "content": ...}`."""


class SampleStatus(Enum):
    """How the generation of a sample ended."""

    PENDING = "pending"
    """Not generated yet."""
    COMPLETED = "completed"
    """The model ended its answer."""
    TRUNCATED = "truncated"
    """The token limit ended it. Such a sample is trained."""
    ABORTED = "aborted"
    """It was interrupted. Such a sample is sampled again and never trained."""


class _NoReward(float):
    """The reward of a sample without a reward: 0, and yet not a reward of 0."""


NO_REWARD = _NoReward()


@dataclass
class Sample:
    """A prompt with its response. There is an example at the top of this module."""

    prompt: Any
    """`Prompt`; prompts of other types, such as rows with an answer, stay what they are."""
    response: str = ""
    tokens: list[int] = field(default_factory=list)
    """[T] ids of the prompt, then of the response."""
    loss_mask: list[float] = field(default_factory=list)
    """[T] 0: no loss on this token, 1: loss, 0.5: half of it. Finite numbers >= 0."""
    reward: float = NO_REWARD
    """0 until the sample is rewarded; `has_reward` tells that from a reward of 0."""
    group_index: int | None = None
    """Samples of one prompt have the same one; it is never used twice in a run."""
    index: int | None = None
    """Number of the sample in the run."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Facts, such as `correct`; the manager adds `weight_version` and `weight_version_end`."""
    rollout_log_probs: list[float] | None = None
    """[T] log-probabilities under the policy that sampled the tokens, 0 where the mask is 0."""
    status: SampleStatus = SampleStatus.PENDING

    Status: ClassVar[type[SampleStatus]] = SampleStatus

    @property
    def has_reward(self) -> bool:
        """Whether `reward` was set, be it to 0."""
        return not isinstance(self.reward, _NoReward)

    def to_dict(self, *, packed: bool = False) -> dict[str, Any]:
        """A copy of all fields that JSON can express if the metadata can, without a reward that was
        not set. `packed`: the tokens,
        mask and log-probabilities as base64, at most 13 bytes a token; log-probabilities are then
        rounded to float32, in which they are trained."""
        data = {name: copy.deepcopy(getattr(self, name)) for name in _SAMPLE_FIELDS}
        data["status"] = self.status.value
        if not self.has_reward:
            del data["reward"]
        return pack_columns(data) if packed else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Read what `to_dict` returns, packed or not. Keys that are no field are left out, with a
        warning. Raises DataError for a missing prompt or an unknown status."""
        unknown = sorted(set(data) - set(_SAMPLE_FIELDS))
        if unknown:
            logger.warning("a sample has the unknown keys %s, which are left out; put them into its metadata", ", ".join(unknown))
        fields = copy.deepcopy({name: data[name] for name in _SAMPLE_FIELDS if name in data})
        if "prompt" not in fields:
            raise DataError(f"a sample has the keys {', '.join(data) or '(none)'}; it needs a prompt")
        status = fields.pop("status", SampleStatus.PENDING.value)
        try:
            fields["status"] = SampleStatus(status)
        except ValueError as error:
            known = ", ".join(one.value for one in SampleStatus)
            raise DataError(f"the status of a sample ({status!r}) must be one of {known}") from error
        return cls(**unpack_columns(fields))


_SAMPLE_FIELDS = tuple(one.name for one in dataclasses.fields(Sample))


@dataclass
class RolloutBatch:
    """B samples, column by column. Example: two answers, of which the first is right.

    RolloutBatch(tokens=[[53, 55, 2], [53, 56]], loss_masks=[[0, 1, 1], [0, 1]],
                 rewards=[1.0, 0.0], response_lengths=[2, 1])
    """

    tokens: list[list[int]]
    """Lists [B, T]; rows have different lengths."""
    loss_masks: list[list[float]]
    """Lists [B, T]."""
    rewards: list[float]
    """[B]"""
    response_lengths: list[int]
    """[B] number of tokens with a mask above 0."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """`epoch_id`, `step_id`, `batch_size`, `prompts`, `responses`, a list `sample_<key>` for each
    key of the samples' metadata, and what the manager counted."""
    samples: list[Sample] = field(default_factory=list)
    """The samples of the rows, in the same order."""


C = TypeVar("C", bound="_Config")


@dataclass(frozen=True)
class _Config:
    """A configuration that a mapping can express, without the functions it holds."""

    _FUNCTIONS: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """All settings but functions, which whoever reads the mapping supplies again."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name not in self._FUNCTIONS}

    @classmethod
    def from_dict(cls: type[C], data: Mapping[str, Any]) -> C:
        """Raises ConfigError for a key that is no setting."""
        return cls._read(data)

    @classmethod
    def _read(cls: type[C], data: Mapping[str, Any], **functions: Any) -> C:
        known = [one.name for one in dataclasses.fields(cls) if one.name not in cls._FUNCTIONS]
        for name in data:
            if name in cls._FUNCTIONS:
                raise ConfigError(f"{cls.__name__}: {name} is a function; give it as the argument {name}= of from_dict")
            if name not in known:
                raise ConfigError(f"{cls.__name__} has no {name!r}{did_you_mean(name, known, 'it has ' + ', '.join(known))}")
        return cls(**data, **functions)


@dataclass(frozen=True)
class SFTTrainingConfig(_Config):
    """Settings of `run_sft_training`."""

    num_steps: int
    """Optimizer steps."""
    batch_size: int
    """Samples of one step."""
    log_every: int = 100
    """Steps between two lines of metrics."""
    checkpoint_every: int = 500
    """Steps between two checkpoints; the last step always has one."""
    seed: int = 0
    """The order of the samples in each pass."""

    def __post_init__(self) -> None:
        _check_counts(self, num_steps=1, batch_size=1, log_every=1, checkpoint_every=1)
        check_value("seed", self.seed, whole=True)


Advantage = Literal["auto", "baseline"]


@dataclass(frozen=True)
class RLTrainingConfig(_Config):
    """Settings of `run_rl_training`."""

    num_steps: int
    """Batches of rollouts to train on."""
    sync_every: int = 10
    """Steps between two publications of the weights to the inference engines."""
    baseline: float = 0.0
    """The baseline subtracted from a reward where advantages are not relative to a group."""
    log_every: int = 10
    checkpoint_every: int = 100
    advantage: Advantage = "auto"
    """`baseline`: reward - baseline. `auto`: relative to the mean of the sample's group where
    groups have more than one member, else as `baseline`."""
    epochs_per_batch: int = 1
    """How often each batch is trained."""
    minibatches_per_batch: int = 1
    """Optimizer steps of one epoch of a batch."""
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("num_steps", "sync_every", "log_every", "checkpoint_every", "epochs_per_batch", "minibatches_per_batch")
        _check_counts(self, **dict.fromkeys(counts, 1))
        check_value("seed", self.seed, whole=True)
        check_value("advantage", self.advantage, choices=get_args(Advantage))
        if not math.isfinite(self.baseline):
            raise ConfigError(f"baseline ({self.baseline}) must be a finite number: it is subtracted from every reward")


GenerateFn = Callable[..., Sequence[Sample] | Awaitable[Sequence[Sample]]]
"""(prompts, **rollout_kwargs) -> one sample for each prompt. A plain or a coroutine function."""
RewardFn = Callable[[Sample], float | Awaitable[float]]
"""Sample -> reward. A plain or a coroutine function."""
FilterFn = Callable[[list[Sample]], bool]
"""The samples of one prompt, with their rewards -> whether they are trained."""
Order = Literal["arrival", "submission"]
OnExhausted = Literal["error", "short"]


@dataclass(frozen=True)
class RolloutConfig(_Config):
    """How batches of samples are generated."""

    batch_size: int
    """Prompts of one batch. (`SFTTrainingConfig.batch_size` counts samples.)"""
    n_samples_per_prompt: int = 1
    """Samples of each prompt: its group. A batch has `batch_size * n_samples_per_prompt`."""
    over_sampling_factor: float = 1.0
    """`ceil(batch_size * over_sampling_factor)` prompts are kept in the air; a batch is complete as
    soon as enough of them are, and the others go on for the next. Only `AsyncRolloutManager` does
    so."""
    generate_fn: GenerateFn = None  # type: ignore[assignment]  # checked below
    """Required. Where its signature has `seeds`, `partial` or `weight_version`, it gets them."""
    reward_fn: RewardFn | None = None
    """None if the samples have their reward already. A plain function is called in the thread of
    the event loop, so a slow judge should be a coroutine function."""
    filter_fn: FilterFn | None = None
    """None means that every group is trained."""
    max_lag: int | None = None
    """Batches by which a prompt may be trained later than it was begun; `TrainerConfig.max_lag`
    counts policy steps instead. None means the least that `over_sampling_factor` needs. Above 0,
    samples are taken while the trainer steps: a sampler in this process needs weights of its own
    then, or `generate_while_training=False`."""
    order: Order = "arrival"
    """`arrival`: a batch has the prompts that are complete first. `submission`: prompts in the
    order of the data, however long their samples take."""
    max_retries: int = 1
    """How often one sample is tried again after a failure."""
    max_concurrency: int | None = None
    """Concurrent calls of `generate_fn`. None means as many as there are samples being generated,
    or 64 of a plain function, since each of them takes a thread."""
    patience: int = 10
    """A batch may refuse `patience * batch_size` groups before `on_exhausted` applies."""
    on_exhausted: OnExhausted = "error"
    """What happens then: an error that says what each filter refused, or a `short` batch."""
    group_calls: bool = False
    """Pass the prompts of a group to `generate_fn` in one call instead of one call each."""
    generate_while_training: bool = True
    """Whether groups go on while the trainer computes. If False, each batch waits for the calls of
    a plain `generate_fn` that still run, up to 30 s; calls of a coroutine function are
    cancelled."""
    seed: int = 0
    """The seeds of samples are derived from it and their position."""
    outage_patience_s: float = 15.0
    """How many seconds no call at all may succeed, because a server is away, before groups are
    lost. Meanwhile each sample is tried again after 1, 2, 4, 8, 8 ... s. 0: only `max_retries`
    counts."""

    _FUNCTIONS = ("generate_fn", "reward_fn", "filter_fn")

    def __post_init__(self) -> None:
        _check_counts(self, batch_size=1, n_samples_per_prompt=1, max_retries=0, patience=1)
        check_value("max_lag", self.max_lag, optional=True, whole=True, least=0)
        check_value("max_concurrency", self.max_concurrency, optional=True, whole=True, least=1)
        check_value("seed", self.seed, whole=True)
        check_value("order", self.order, choices=get_args(Order))
        check_value("on_exhausted", self.on_exhausted, choices=get_args(OnExhausted))
        check_value("outage_patience_s", self.outage_patience_s, least=0, below=math.inf)
        choose_max_lag(self.over_sampling_factor, self.max_lag)
        if self.generate_fn is None:
            raise ConfigError("RolloutConfig needs generate_fn, a function of a list of prompts that returns one Sample for each")
        for name in self._FUNCTIONS:
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise ConfigTypeError(f"{name} must be a function, not {type(function).__name__}; pass it without calling it")
        if self.filter_fn in COMPARING and self.n_samples_per_prompt == 1:
            raise ConfigError(f"filter_fn ({name_of_filter(self.filter_fn)}) needs n_samples_per_prompt (1) to be at least 2")

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        generate_fn: GenerateFn | None = None,
        reward_fn: RewardFn | None = None,
        filter_fn: FilterFn | None = None,
    ) -> RolloutConfig:
        """Raises ConfigError for a key that is no setting."""
        return cls._read(data, generate_fn=generate_fn, reward_fn=reward_fn, filter_fn=filter_fn)


def _check_counts(config: _Config, **least: int) -> None:
    for name, lowest in least.items():
        check_value(name, getattr(config, name), whole=True, least=lowest)
