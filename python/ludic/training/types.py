"""The data types between the stages of training: requests become rollouts, rollouts get credit, and
their steps become samples.

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

A sample takes this path to the trainer: `RolloutRequest` -> `RolloutEngine` -> `Rollout` ->
`CreditAssigner` -> `SAWItem` -> `SAWBatch`. Shapes: a sample has T tokens; A of them are action
tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ludic.errors import DataError, DataTypeError
from ludic.inference.request import InferenceSpec
from ludic.types import ImageSpan, Rollout, Routes, Step, is_list_of, lists_when_read, stored

if TYPE_CHECKING:
    from torch import Tensor

RolloutStepKey = tuple[str, int]
"""(rollout id, step index). Identifies the step that gets a weight. Example: `("r0", 2)`."""

TOKEN_WEIGHT = "token_weight"
"""The token column with the credit of each action token (`SampleAttachments.token_columns`)."""

# Documented type names for user code; the library itself does not use them.
TokenizeFn = Callable[[str], list[int]]
"""text -> token ids"""
StateFromStepFn = Callable[[Rollout, int, Step], str]
"""(rollout, step index, step) -> the state as text"""


@dataclass
class EnvSpec:
    """An environment, named by its key in the engine's registry.

    Example: for `EnvSpec("addition", {"digits": 2})` the engine calls
    `env_registry["addition"](digits=2)`.
    """

    kind: str
    """Key of the engine's `env_registry`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


@dataclass
class CtxSpec:
    """A context strategy, identified by its name."""

    kind: str
    """Name of the strategy."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


@dataclass
class ProtocolSpec:
    """An interaction protocol, named by its key in the engine's registry."""

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
    """How agents act in the environment; each episode gets a new protocol object."""
    env_seed: int | None = None
    """Seed of `env.reset`; all members of a group have the same one. None means the episode
    number."""
    sampling_seed: int | None = None
    """Seed of the episode's first model call; the seeds of later calls are derived from it. None
    means the episode number."""
    inference: InferenceSpec | None = None
    """Sampling settings, and what the server returns in addition to the text. None means the
    defaults."""
    num_episodes: int = 1
    """Number of episodes to play. All of them use `env_seed` and `sampling_seed` if these are
    set."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Copied to the rollout's meta. Requests with the same `group_id` are one group."""


RequestsFn = Callable[[], Sequence[RolloutRequest] | Awaitable[Sequence[RolloutRequest]]]
"""Returns the requests of the next batch or evaluation. A plain or a coroutine function."""


@lists_when_read("token_logps")
@dataclass(frozen=True)
class ActorTokenLogps:
    """Sampled log-probabilities of a sample's action tokens under the policy that sampled them, as
    the sampler reported them. "Actor" in a public name means this policy."""

    token_logps: list[float]
    """[A] natural logarithms; a list of floats or a one-dimensional float array."""

    def __post_init__(self) -> None:
        logps = stored(self, "token_logps")
        if not (is_float_array(logps) or is_list_of(logps, float, int)):
            raise DataTypeError(f"token_logps must be a List[float] or a float array, got {type(logps).__name__}")


def is_float_array(value: object) -> bool:
    """Whether `value` is a one-dimensional array of floats."""
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind == "f"


@dataclass
class SampleAttachments:
    """Optional per-token data of a sample."""

    actor_logps: ActorTokenLogps | None = None
    """None if the sampler returned no log-probabilities, or if no policy sampled the tokens."""
    reference_logps: list[float] | None = None
    """[A] log-probabilities of the action tokens under a reference, computed beforehand: a list of
    floats or a one-dimensional float array. If all samples of a batch have them, no reference
    scores the batch. They do not travel between processes, nor into checkpoints of batches."""
    action_fractions: list[float] | None = None
    """[A] weight of each action token, a number > 0: a token of 0.5 is half a token in sums and in
    numbers of tokens. A list of floats or a one-dimensional float array. None means 1 each."""
    token_columns: dict[str, Sequence[float] | NDArray[Any]] = field(default_factory=dict)
    """Name -> [A] values of the action tokens, lists of floats or one-dimensional float arrays.
    Micro-batches have them under that name in the layout of `input_ids`, in float32; a loss reads a
    column of yours by `shared.read_logps(name)`. Samples without `token_weight`, the credit of each
    token, have their weight at every token; any other column must be on all samples of a batch."""
    candidates: Sequence[Sequence[int] | NDArray[np.int32]] | None = field(default=None, compare=False)
    """[A] the ids that each action token was sampled among, with its own; none means the whole
    vocabulary. The trained policy is then softmax over them."""
    routes: Routes | None = None
    """The experts that the sampler chose, of the first tokens of the sample, the prompt included
    (`TrainerConfig.replay_routing`)."""

    def __post_init__(self) -> None:
        if self.candidates is not None and not isinstance(self.candidates, Sequence):
            raise DataTypeError(f"candidates must be a list of ids for each token, got {type(self.candidates).__name__}")
        if self.reference_logps is None and self.action_fractions is None and not self.token_columns:
            return  # nothing more to check: the most samples, of which there are thousands
        own = {"reference_logps": self.reference_logps, "action_fractions": self.action_fractions}
        for name, values in {**own, **self.token_columns}.items():
            if values is not None and not (is_float_array(values) or is_list_of(values, float, int)):
                raise DataTypeError(f"{name} must be a List[float] or a float array, got {type(values).__name__}")

    def check_sendable(self) -> None:
        """Raise DataError for what no codec of samples carries."""
        if self.reference_logps is not None:
            raise DataError("a sample with reference_logps cannot be stored or sent; score it with FrozenModel instead")


@lists_when_read("input_ids", "attention_mask", "action_mask")
@dataclass
class SAWItem:
    """State, action, weight: one training sample. Its three sequences are lists or numpy arrays of
    equal length T. There is an example at the top of this module.

    The sample of a `TokenTrace` that holds arrays holds arrays too, which the core reads without a
    Python number. Each becomes a list when its attribute is read; what you change in it is trained.
    """

    input_ids: list[int]
    """[T] token ids of the state, then of the action."""
    attention_mask: list[int]
    """[T] 1 on every token."""
    action_mask: list[int]
    """[T] 0 on the state, 1 on the action."""
    weight: float
    """Credit of the action. A policy-gradient loss multiplies the log-probability of the action by
    it. With a token column `token_weight`, whose values take its place, their mean."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Facts for statistics and grouping: `rollout_id`, `step_index`, `group_id`, the reward; for
    preference samples `pair_id`, `role` and `label`."""
    attachments: SampleAttachments = field(default_factory=SampleAttachments)
    """Optional per-token data."""
    images: tuple[ImageSpan, ...] = ()
    """The images of the sample, in order; their places in `input_ids`."""

    @property
    def actor_logps(self) -> ActorTokenLogps | None:
        """`attachments.actor_logps`."""
        return self.attachments.actor_logps

    @property
    def largest_weight(self) -> float:
        """The largest absolute credit of a token: 0 if the sample teaches nothing."""
        return float(np.abs(np.asarray(self.attachments.token_columns.get(TOKEN_WEIGHT, self.weight))).max(initial=0.0))


@dataclass
class SAWBatch:
    """A macro-batch: the samples that one call of `BatchSource.next_batch` returns."""

    items: list[SAWItem]
    """The samples."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Facts about the batch: `target_rollouts`, `num_samples`, `avg_total_reward` and others."""


SampleFilter = Callable[[SAWItem], bool]
"""Returns True for a sample to keep."""


class RolloutScorer(Protocol):
    """Rewards finished rollouts, all rollouts of a batch in one call."""

    async def score(self, rollouts: Sequence[Rollout]) -> Mapping[str, Exception]:
        """Change the rewards in place, or write scores to `meta` for the credit assigner.

        Returns rollout id -> error for the rollouts that could not be rewarded; an empty mapping if
        there are none.
        """
        ...


class CreditAssigner(Protocol):
    """Computes a weight for each step from the rewards, or one for each of its sampled tokens."""

    def compute(self, rollouts: Sequence[Rollout]) -> Mapping[RolloutStepKey, float | NDArray[Any]]:
        """Return the weight of every step of `rollouts`: a float, or [A] floats for its A sampled
        tokens.

        Example: `{("r0", 0): 0.5, ("r1", 0): np.array([0.0, -0.5])}`.
        """
        ...


@dataclass(frozen=True, eq=False)
class Candidates:
    """The samples of a macro-batch as columns, for credit that compares whole groups: N rows, one a
    sample. A candidate is a rollout; with several turns it has several rows.

    Example: a group of two rollouts, of which the first has two turns of 3 and 2 action tokens.

        Candidates(utility=[1, 1, 0], group=[0, 0, 0], rollout=[0, 0, 1], token_count=[3, 2, 4])
    """

    utility: NDArray[np.float64]
    """[N] the samples' weights, as the credit assigner gave them."""
    group: NDArray[np.int64]
    """[N] number of the row's group, from 0 in order of first appearance: rows with the same group
    id and, with several agents, the same agent."""
    rollout: NDArray[np.int64]
    """[N] number of the row's rollout, from 0 in order of first appearance."""
    token_count: NDArray[np.int64]
    """[N] predicted action tokens."""
    reference_logp: NDArray[np.float64] | None = None
    """[N] sum of the log-probabilities of the row's action tokens under the reference. None if no
    reference scored them."""
    behaviour_logp: NDArray[np.float64] | None = None
    """[N] the same under the policy that sampled them. None if a sample has none."""
    sum_over_ranks: Callable[[list[float]], list[float]] = list
    """Sums each number over the ranks, whose samples are others; by default there is one rank."""
    max_over_ranks: Callable[[list[float]], list[float]] = list
    """The largest of each number over the ranks."""


@dataclass(frozen=True, eq=False)
class CandidateGroups:
    """What listwise weights were computed from: C candidates in G groups, one group after another.

    Example: offsets [0, 3, 5] are a group of three candidates and a group of two.
    """

    offsets: NDArray[np.int64]
    """[G + 1] index of each group's first candidate, and C."""
    q: NDArray[np.float64]
    """[C] the distribution made from the utilities; sums to 1 in each group."""
    reference_logp: NDArray[np.float64] | None = None
    """[C] log-probability of each candidate under the reference, mean or sum over its tokens as the
    weights use it. None without a reference."""
    behaviour_logp: NDArray[np.float64] | None = None
    """[C] mean log-probability of its tokens under the policy that sampled them. None if
    unknown."""

    def __len__(self) -> int:
        """G, the number of groups on this rank."""
        return len(self.offsets) - 1


@dataclass(frozen=True, eq=False)
class Weighed:
    """The result of `BatchCredit.weigh`."""

    weights: NDArray[np.float64]
    """[N] new weight of each sample."""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Name -> [N] more columns for the loss, whose batch has them as tensors [B]."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """Statistics of the step over all ranks."""
    groups: CandidateGroups | None = None
    """The groups of this rank, for controllers."""


class BatchCredit(Protocol):
    """Computes the weights of all samples of a macro-batch from their utilities, once a step and
    before the batch is divided. With several ranks, all of them call it."""

    @property
    def reads_reference(self) -> bool:
        """Whether `weigh` reads `Candidates.reference_logp`."""
        ...

    def weigh(self, candidates: Candidates) -> Weighed:
        """Return the weights. Raises DataError for candidates without what it needs."""
        ...


class ReferencePolicy(Protocol):
    """A policy that does not change while the model is trained; `training.reference` has some."""

    @property
    def computes_trees(self) -> bool:
        """Whether `logps` also takes micro-batches with prefix trees. The trainer reads it when it
        is made. A reference of yours without this member gets rows of their own."""
        return False

    def logps(self, micro_batch: Any) -> Tensor | Awaitable[Tensor]:
        """Of a `batching.packing.MicroBatch`: [B, T - 1] log-probability of each next token,
        without gradient; only action tokens are read. With several ranks, all call it equally
        often."""
        ...


class BatchSource(Protocol):
    """Returns macro-batches. A source must have this one method; `batching.source.BatchSourceBase`
    lists the optional members that the trainer also reads."""

    async def next_batch(self) -> SAWBatch:
        """Return the next macro-batch. Raises RequestsExhausted or StopAsyncIteration if there is
        none."""
        ...


@runtime_checkable
class HasActorLogps(Protocol):
    """A sample with the log-probabilities that the sampler reported."""

    @property
    def actor_logps(self) -> ActorTokenLogps | None: ...


def has_actor_logps(item: SAWItem) -> TypeGuard[HasActorLogps]:
    """Whether the sample has the log-probabilities that the sampler reported."""
    return item.attachments.actor_logps is not None
