"""Where the stages of training meet: requests become rollouts, rollouts get credit, and their
steps become samples.

A worked example. The prompt is `2+2=` (ids 53 46 53 64), the sampled answer `4<eos>` (ids 55 2),
and its credit 0.5:

    SAWItem(
        input_ids=[53, 46, 53, 64, 55, 2],        # state, then action: T = 6
        attention_mask=[1, 1, 1, 1, 1, 1],
        action_mask=[0, 0, 0, 0, 1, 1],           # A = 2 action tokens
        weight=0.5,
        meta={"rollout_id": "r0", "step_index": 0},
        attachments=SampleAttachments(actor_logps=ActorTokenLogps([-0.2, -0.1])),
    )

`RolloutRequest` -> `RolloutEngine` -> `Rollout` -> `CreditAssigner` -> `SAWItem` -> `SAWBatch` is
the way of a sample to the trainer. Shapes: T tokens of a sample, A of them action tokens.
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
"""(rollout id, step index): what credit is given to. Example: `("r0", 2)`."""

# Documented names for the signatures of user code; nothing in the library uses them.
TokenizeFn = Callable[[str], list[int]]
"""text -> token ids"""
StateFromStepFn = Callable[[Rollout, int, Step], str]
"""(rollout, step index, step) -> the state as text"""


@dataclass
class EnvSpec:
    """An environment, by its name in the engine's registry.

    Example: `EnvSpec("addition", {"digits": 2})` is made by `env_registry["addition"](digits=2)`.
    """

    kind: str
    """Key of the engine's `env_registry`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


@dataclass
class CtxSpec:
    """A context strategy, by its name."""

    kind: str
    """Name of the strategy."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


@dataclass
class ProtocolSpec:
    """An interaction protocol, by its name in the engine's registry."""

    kind: str
    """Key of the engine's `protocol_registry`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


@dataclass
class RolloutRequest:
    """Asks the engine to play `num_episodes` episodes.

    Example: two members of one group, the same problem sampled twice.

        env, protocol = EnvSpec("addition"), ProtocolSpec("single_agent")
        RolloutRequest(env, protocol, env_seed=7, sampling_seed=100, meta={"group_id": "g"})
        RolloutRequest(env, protocol, env_seed=7, sampling_seed=101, meta={"group_id": "g"})
    """

    env: EnvSpec
    """The environment; each episode gets a new one."""
    protocol: ProtocolSpec
    """How agents play in it; each episode gets a new one."""
    env_seed: int | None = None
    """Seed of `env.reset`; members of a group share it. None: the episode's number."""
    sampling_seed: int | None = None
    """Seed of the episode's first model call; later calls derive theirs from it. None: the
    episode's number."""
    inference: InferenceSpec | None = None
    """Sampling settings, and what the server returns beside the text. None: the defaults."""
    num_episodes: int = 1
    """Episodes to play; given seeds are the same for all of them."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Copied to the rollout's meta. Requests with the same `group_id` are one group."""


RequestsFn = Callable[[], Sequence[RolloutRequest] | Awaitable[Sequence[RolloutRequest]]]
"""Returns the requests of the next batch or evaluation. A plain or a coroutine function."""


@dataclass(frozen=True)
class ActorTokenLogps:
    """Log-probabilities of a sample's action tokens under the policy that sampled them."""

    token_logps: list[float]
    """[A] natural logarithms; a list of float or a one-dimensional float array."""

    def __post_init__(self) -> None:
        if not (is_list_of(self.token_logps, float, int) or is_float_array(self.token_logps)):
            raise DataTypeError(f"token_logps must be a List[float] or a float array, got {type(self.token_logps).__name__}")


def is_float_array(value: object) -> bool:
    """Whether `value` is a one-dimensional array of floats."""
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind == "f"


@dataclass
class SampleAttachments:
    """Optional per-token data of a sample."""

    actor_logps: ActorTokenLogps | None = None
    """From the sampler; None if it returned none, or if the sample was not sampled."""


@dataclass
class SAWItem:
    """State, action, weight: one training sample. Its sequences are lists or numpy arrays of one
    length T. The example is at the top of this module."""

    input_ids: list[int]
    """[T] token ids of the state, then of the action."""
    attention_mask: list[int]
    """[T] 1 on every token."""
    action_mask: list[int]
    """[T] 0 on the state, 1 on the action."""
    weight: float
    """Credit of the action: what a policy-gradient loss multiplies its log-probability by."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Facts for statistics and grouping: `rollout_id`, `step_index`, `group_id`, the reward; for
    preference samples `pair_id`, `role` and `label`."""
    attachments: SampleAttachments = field(default_factory=SampleAttachments)
    """Optional per-token data."""

    @property
    def actor_logps(self) -> ActorTokenLogps | None:
        """`attachments.actor_logps`."""
        return self.attachments.actor_logps


@dataclass
class SAWBatch:
    """A macro-batch: what one call of `BatchSource.next_batch` returns."""

    items: list[SAWItem]
    """The samples."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Facts about the batch: `target_rollouts`, `num_samples`, `avg_total_reward` and others."""


SampleFilter = Callable[[SAWItem], bool]
"""True keeps the sample."""


class RolloutScorer(Protocol):
    """Rewards rollouts after they were played, all rollouts of a batch at once."""

    async def score(self, rollouts: Sequence[Rollout]) -> Mapping[str, Exception]:
        """Add to the rewards in place, or to the meta that credit is computed from. Returns the
        error of each rollout that could not be rewarded, by rollout id; an empty mapping if all
        were."""
        ...


class CreditAssigner(Protocol):
    """Turns rewards into one weight for each step."""

    def compute(self, rollouts: Sequence[Rollout]) -> dict[RolloutStepKey, float]:
        """The weight of every step of `rollouts`. Example: `{("r0", 0): 0.5, ("r1", 0): -0.5}`."""
        ...


class BatchSource(Protocol):
    """Gives macro-batches: all that a source must have. What else the trainer reads of one that has
    it is in `batching.source.BatchSourceBase`."""

    async def next_batch(self) -> SAWBatch:
        """The next macro-batch. Raises RequestsExhausted or StopAsyncIteration where there is
        none."""
        ...


@runtime_checkable
class HasActorLogps(Protocol):
    """A sample that carries the log-probabilities it was sampled with."""

    @property
    def actor_logps(self) -> ActorTokenLogps | None: ...


def has_actor_logps(item: SAWItem) -> TypeGuard[HasActorLogps]:
    """Whether the sample carries the log-probabilities of the policy that sampled it."""
    return item.attachments.actor_logps is not None
