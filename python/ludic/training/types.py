"""Where the stages of training meet: requests for rollouts, credit, and the samples that are
trained.

A worked example. The prompt `2+2=` (ids 53 46 53 64), the sampled answer `4<eos>` (55 2), and
credit 0.5:

    SAWItem(
        input_ids=[53, 46, 53, 64, 55, 2],
        attention_mask=[1, 1, 1, 1, 1, 1],
        action_mask=[0, 0, 0, 0, 1, 1],
        weight=0.5,
        meta={"rollout_id": "r0", "step_index": 0},
        attachments=SampleAttachments(actor_logps=ActorTokenLogps([-0.2, -0.1])),
    )
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

from ludic.errors import DataTypeError
from ludic.inference.request import InferenceSpec
from ludic.types import Rollout, Step, is_list_of

RolloutStepKey = tuple[str, int]
"""(rollout id, step index)."""
TokenizeFn = Callable[[str], list[int]]
StateFromStepFn = Callable[[Rollout, int, Step], str]


@dataclass
class EnvSpec:
    """An environment by its name in the engine's registry, and the factory's keywords."""

    kind: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class CtxSpec:
    """A context strategy by name, and the factory's keywords."""

    kind: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ProtocolSpec:
    """An interaction protocol by its name in the engine's registry, and the factory's keywords."""

    kind: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutRequest:
    """A wish for `num_episodes` episodes."""

    env: EnvSpec
    protocol: ProtocolSpec
    env_seed: int | None = None
    """Seed of `env.reset`; members of a group share it."""
    sampling_seed: int | None = None
    """Seed of the first model call; later calls of the episode derive theirs from it."""
    inference: InferenceSpec | None = None
    num_episodes: int = 1
    meta: dict[str, Any] = field(default_factory=dict)
    """Copied to the rollout's meta; `group_id` makes a group."""


RequestsFn = Callable[[], Sequence[RolloutRequest] | Awaitable[Sequence[RolloutRequest]]]
"""Returns the requests of the next batch or evaluation. A plain or a coroutine function."""


@dataclass(frozen=True)
class ActorTokenLogps:
    """[A] log-probability of each action token under the policy that sampled it. A list of float
    or a float array."""

    token_logps: list[float]

    def __post_init__(self) -> None:
        if not (is_list_of(self.token_logps, float, int) or is_float_array(self.token_logps)):
            raise DataTypeError(f"token_logps must be a List[float] or a float array, got {type(self.token_logps).__name__}")


def is_float_array(value: object) -> bool:
    """Whether `value` is a one-dimensional array of floats."""
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind == "f"


@dataclass
class SampleAttachments:
    """What a sample carries beside its tokens."""

    actor_logps: ActorTokenLogps | None = None


@dataclass
class SAWItem:
    """State, action, weight: one sample. Sequences are lists or numpy arrays of one length T."""

    input_ids: list[int]
    """[T] the state's ids, then the action's."""
    attention_mask: list[int]
    """[T] 1 where there is a token."""
    action_mask: list[int]
    """[T] 0 on the state, 1 on the action."""
    weight: float
    """Credit of the action."""
    meta: dict[str, Any] = field(default_factory=dict)
    attachments: SampleAttachments = field(default_factory=SampleAttachments)

    @property
    def actor_logps(self) -> ActorTokenLogps | None:
        return self.attachments.actor_logps


@dataclass
class SAWBatch:
    """A macro-batch: what one call of the batch source gives."""

    items: list[SAWItem]
    meta: dict[str, Any] = field(default_factory=dict)
    """`target_rollouts`, `num_samples`, `avg_total_reward` and the like."""


SampleFilter = Callable[[SAWItem], bool]
"""True keeps the sample."""


class RolloutScorer(Protocol):
    """Rewards rollouts after they were played, all of a batch at once."""

    async def score(self, rollouts: Sequence[Rollout]) -> Mapping[str, Exception]:
        """Add to the rewards, or to the meta that credit is given by, in place. Returns why a
        rollout could not be rewarded, by its id; nothing where all were."""
        ...


class CreditAssigner(Protocol):
    """Turns rewards into one weight a step."""

    def compute(self, rollouts: Sequence[Rollout]) -> dict[RolloutStepKey, float]: ...


class BatchSource(Protocol):
    """Gives macro-batches. It may also offer `state_dict` and `load_state_dict`, which
    checkpoints then keep, and say `shards_across_ranks`."""

    async def next_batch(self) -> SAWBatch: ...


@runtime_checkable
class SaysWhetherItShards(Protocol):
    """A batch source that knows what several ranks are given."""

    @property
    def shards_across_ranks(self) -> bool | None:
        """Whether each rank is given samples of its own. False: all are given the same. None: a
        source inside does not say."""


def shards_across_ranks(source: BatchSource) -> bool | None:
    """What the source says; None for one that says nothing."""
    return source.shards_across_ranks if isinstance(source, SaysWhetherItShards) else None


@runtime_checkable
class HasActorLogps(Protocol):
    """A sample that knows the log-probabilities it was sampled with."""

    @property
    def actor_logps(self) -> ActorTokenLogps | None: ...


def has_actor_logps(item: SAWItem) -> TypeGuard[HasActorLogps]:
    """Whether the sample carries the log-probabilities of the policy that sampled it."""
    return item.attachments.actor_logps is not None
