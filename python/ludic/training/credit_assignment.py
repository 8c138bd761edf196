"""Credit assigners: compute one weight for each step from the rewards of rollouts, or from scores
of a reward model. Plain float64 arithmetic without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ludic.errors import ConfigError, DataError, check_value
from ludic.training.types import CreditAssigner, RolloutStepKey
from ludic.types import Rollout, Step, group_of, stored

Weights = dict[RolloutStepKey, float]
"""(rollout id, step index) -> weight."""
TokenWeights = dict[RolloutStepKey, float | NDArray[Any]]
"""(rollout id, step index) -> weight of the step, or [A] weights of its sampled tokens."""
Scale = Literal["population", "sample", "mean"]
"""What advantages are divided by: the standard deviation of the group, with squares divided by G or
by G - 1, or its mean return."""


@dataclass
class MonteCarloReturn:
    """G_t = r_t + gamma G_{t+1}: the discounted sum of the rewards from step t on.

    Example: rewards [0, 0, 1] with gamma 0.5 give weights [0.25, 0.5, 1].
    """

    gamma: float = 1.0

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        for rollout in rollouts:
            future_return = 0.0
            for step in reversed(rollout.steps):
                future_return = step.reward + self.gamma * future_return
                weights[rollout.id, step.index] = future_return
        return weights


@dataclass
class BranchReturn:
    """`MonteCarloReturn` for episodes of agents, whose calls are a tree: G(call) = r(call) + gamma
    times the mean of G over the calls that continue it.

    `step.info["parent"]` is the number of the call that a step continues, and `step.info["call"]`
    its own; a step without `parent` follows the step before it. The outcome of an episode, which is
    the reward of its last step, belongs to all its paths: every call that none continues has it.

    Example: calls 1 and 2 continue 0, the outcome is 1 and gamma 0.5: the weights are .5, 1, 1.
    """

    gamma: float = 1.0

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        for rollout in rollouts:
            numbers = [step.info.get("call", index) for index, step in enumerate(rollout.steps)]
            children: dict[int, list[float]] = {}
            outcome = rollout.steps[-1].reward if rollout.steps else 0.0
            for index in reversed(range(len(rollout.steps))):
                step = rollout.steps[index]
                later = children.get(numbers[index])
                own = step.reward if index < len(rollout.steps) - 1 else 0.0
                value = own + (outcome if later is None else self.gamma * sum(later) / len(later))
                weights[rollout.id, step.index] = value
                parent = step.info["parent"] if "parent" in step.info else numbers[index - 1] if index else None
                if parent is not None:
                    children.setdefault(parent, []).append(value)
        return weights


@dataclass
class PerStepReward:
    """The weight of a step is its own reward."""

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return {(rollout.id, step.index): float(step.reward) for rollout in rollouts for step in rollout.steps}


@dataclass
class EpisodicReturn:
    """The weight of every step is the undiscounted return of its episode.

    With `group_size` the groups are checked as by `GroupNormalizedReturn`: a group of
    another size is a DataError, a smaller one is fine with `allow_partial`.
    """

    group_size: int | None = None
    allow_partial: bool = False

    def __post_init__(self) -> None:
        if self.group_size is not None:
            check_group_size(self.group_size)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        if self.group_size is not None:
            group_positions(rollouts, self.group_size, allow_partial=self.allow_partial)
        return _weights_by_step(rollouts, [_episode_return(rollout) for rollout in rollouts])


@dataclass
class ConstantCredit:
    """Every step has the weight `value`, as in supervised fine-tuning."""

    value: float = 1.0

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return _weights_by_step(rollouts, [self.value] * len(rollouts))


@dataclass
class GroupNormalizedReturn:
    """A_i = R_i - mean(R of its group), at every step of rollout i (GRPO, arXiv:2402.03300, section
    4.1).

    In this order: subtract the mean; clamp at 0 if `positive_only`; divide by (standard deviation
    of the group's advantages + `eps`) if `normalize_adv`. `normalize="sample"` is the deviation of
    TRL and verl; "mean" divides by the group's mean return instead, as MaxRL (arXiv:2602.02710),
    which approaches the gradient of the log-probability of a right answer. Rollouts with the same
    `meta["request_meta"]["group_id"]` and, with several agents, the same `agent_id` form a group. A
    group of equal returns gets exactly 0.

    `allow_partial`: a group may be smaller than `group_size`, for engines that lose rollouts; a
    larger group is always an error. `leave_one_out`: subtract the mean of the other returns instead
    (RLOO, arXiv:2402.14740); this multiplies the advantage by G / (G - 1).

    Example: returns [1, 0, 0, 1] have mean 0.5 and advantages [0.5, -0.5, -0.5, 0.5]; normalised
    they are [1, -1, -1, 1].
    """

    group_size: int
    normalize_adv: bool = False
    positive_only: bool = False
    eps: float = 1e-8
    allow_partial: bool = False
    leave_one_out: bool = False
    normalize: Scale = "population"

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        check_value("normalize", self.normalize, choices=get_args(Scale))

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        advantages = np.zeros(len(rollouts))
        for members in group_positions(rollouts, self.group_size, allow_partial=self.allow_partial):
            returns = [_episode_return(rollouts[i]) for i in members]
            advantage = _subtract_mean(returns)
            if self.leave_one_out and len(members) > 1:
                advantage = advantage * (len(members) / (len(members) - 1))
            if self.positive_only:
                advantage = np.maximum(advantage, 0.0)
            if self.normalize_adv:
                advantage = advantage / (_scale(self.normalize, returns, advantage) + self.eps)
            advantages[members] = advantage
        return _weights_by_step(rollouts, advantages.tolist())


@dataclass
class HybridNormalizedReturn:
    """A_i = (R_i - mean(R of its group)) / (std of all centred returns of the batch + eps)
    (ScaleRL, arXiv:2510.13786).

    The population standard deviation is over rollouts, one value each. `positive_only` clamps at 0
    after the division.
    """

    group_size: int
    eps: float = 1e-8
    positive_only: bool = False
    allow_partial: bool = False

    def __post_init__(self) -> None:
        check_group_size(self.group_size)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        advantages = np.zeros(len(rollouts))
        for members in group_positions(rollouts, self.group_size, allow_partial=self.allow_partial):
            advantages[members] = _subtract_mean([_episode_return(rollouts[i]) for i in members])
        if len(rollouts):
            advantages = advantages / (advantages.std() + self.eps)
        if self.positive_only:
            advantages = np.maximum(advantages, 0.0)
        return _weights_by_step(rollouts, advantages.tolist())


@dataclass
class BatchNormalizedReturn:
    """A_i = (R_i - mean of all returns of the batch) / (their std + eps), at every step of rollout
    i (REINFORCE++, arXiv:2501.03262).

    Mean and population standard deviation are over rollouts, one value each. A batch of equal
    returns gets exactly 0.
    """

    eps: float = 1e-8

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        if not rollouts:
            return {}
        advantage = _subtract_mean([_episode_return(rollout) for rollout in rollouts])
        return _weights_by_step(rollouts, (advantage / (advantage.std() + self.eps)).tolist())


@dataclass
class OverlongPenalty:
    """Subtracts a penalty for answers close to the token limit, then computes the credit of
    `inner` (DAPO, arXiv:2503.14476, soft overlong punishment).

    For an answer of n sampled tokens, factor * clamp((n - (max_tokens - buffer_tokens)) /
    buffer_tokens, 0, 1) is subtracted from the reward. Example: with max_tokens=100 and
    buffer_tokens=20 the penalty is 0 for 80 tokens, 0.5 for 90 and 1 for 100. Only the credit
    includes the penalty; the logged rewards do not change.
    """

    inner: CreditAssigner
    max_tokens: int
    """`max_tokens` of sampling: the length at which an answer is cut off."""
    buffer_tokens: int
    """The penalty rises over this many tokens before the limit. 0: no penalty."""
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_value("buffer_tokens", self.buffer_tokens, "max_tokens bounds it", least=0, most=self.max_tokens)
        check_value("factor", self.factor, "it is subtracted from the reward", least=0)

    def compute(self, rollouts: Sequence[Rollout]) -> Mapping[RolloutStepKey, float | NDArray[Any]]:
        """Raises DataError for a step without a token trace: its length is unknown."""
        penalised = []
        for rollout in rollouts:
            steps = [replace(step, reward=step.reward - self._penalty(rollout, step)) for step in rollout.steps]
            penalised.append(replace(rollout, steps=steps))
        return self.inner.compute(penalised)

    def _penalty(self, rollout: Rollout, step: Step) -> float:
        if step.trace is None:
            raise DataError(f"step {step.index} of rollout {rollout.id} has no token trace; sample with ReturnSpec.for_rl()")
        over = len(stored(step.trace, "completion_token_ids")) - (self.max_tokens - self.buffer_tokens)
        return self.factor * min(1.0, over / self.buffer_tokens) if over > 0 and self.buffer_tokens else 0.0


def _episode_return(rollout: Rollout) -> float:
    """Return the sum of the rewards, rounded once, so that the same rewards in another order give
    exactly the same return. Raises DataError for rewards that are not finite."""
    rewards = [step.reward for step in rollout.steps]
    if not all(map(math.isfinite, rewards)):
        raise DataError(f"the rewards of rollout {rollout.id} are {rewards}; rewards must be finite")
    return math.fsum(rewards)


def _subtract_mean(returns: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """[N] returns minus their mean; exactly 0 if all are equal, even if the mean is rounded."""
    values = np.asarray(returns, dtype=np.float64)
    if np.all(values == values[0]):
        return np.zeros_like(values)
    return values - values.mean()


def _scale(kind: Scale, returns: Sequence[float], advantage: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Raises DataError for the "mean" of a return below 0, which could turn the sign."""
    if kind != "mean":
        return float(advantage.std(ddof=kind == "sample" and len(advantage) > 1))
    if min(returns) < 0:
        raise DataError(f"normalize=mean divides by the mean of returns, which must be >= 0; a group has {min(returns)}")
    return math.fsum(returns) / len(returns)


def group_key(meta: Mapping[str, Any], name: str) -> tuple[object, object]:
    """The group of the rollout or sample `name`, read from its meta. With several agents
    (`meta["agent_id"]`), each agent has its own group: it is compared with itself in the other
    episodes. Raises DataError if there is none."""
    group = group_of(meta)
    if group is None:
        raise DataError(f"{name} is missing group_id in meta['request_meta']; expand requests with GRPORequestStrategy")
    return group, meta.get("agent_id")


def group_positions(rollouts: Sequence[Rollout], group_size: int, *, allow_partial: bool) -> list[list[int]]:
    """Indices of the rollouts of each group (`group_key`), in order of first appearance.

    Example: rollouts of groups a b a give [[0, 2], [1]].
    """
    groups: dict[tuple[object, object], list[int]] = {}
    for position, rollout in enumerate(rollouts):
        groups.setdefault(group_key(rollout.meta, f"rollout {rollout.id}"), []).append(position)
    for (group, agent), members in groups.items():
        if len(members) > group_size or (len(members) < group_size and not allow_partial):
            whose = "" if agent is None else f" of agent {agent}"
            raise DataError(f"Group size mismatch: group {group}{whose} has {len(members)} rollouts, group_size is {group_size}")
    return list(groups.values())


def _weights_by_step(rollouts: Sequence[Rollout], values: Sequence[float]) -> Weights:
    """Give all steps of a rollout the value of the rollout."""
    return {
        (rollout.id, step.index): float(value) for rollout, value in zip(rollouts, values, strict=True) for step in rollout.steps
    }


def check_group_size(group_size: int) -> None:
    """Raise ConfigError unless a group can have this number of members."""
    if not group_size > 0:
        raise ConfigError(f"group_size must be positive, got {group_size}")


CombineMode = Literal["replace", "add", "multiply", "weighted", "bonus"]
"""How a score is combined with a base, which is a reward or a weight; see `score_coefficients`."""


def score_coefficients(mode: CombineMode, score: float, *, rm_coeff: float = 1.0, alpha: float = 0.5) -> tuple[float, float]:
    """Return (scale, offset): a base and a score are combined to scale * base + offset.

    - `replace`: score
    - `add`: base + score
    - `multiply`: base * score
    - `weighted`: alpha * base + (1 - alpha) * score
    - `bonus`: base + rm_coeff * score
    """
    check_value("mode", mode, choices=get_args(CombineMode))
    match mode:
        case "replace":
            return 0.0, score
        case "add":
            return 1.0, score
        case "multiply":
            return score, 0.0
        case "weighted":
            return alpha, (1 - alpha) * score
        case "bonus":
            return 1.0, rm_coeff * score


def read_score(rollout: Rollout, key: str) -> float:
    """Return the score that a `RewardModelScorer` wrote to the rollout's meta. Raises DataError
    unless it is a finite number."""
    score = rollout.meta.get(key)
    if isinstance(score, bool) or not isinstance(score, Real) or not math.isfinite(score):
        raise DataError(f"rollout {rollout.id} has {key}={score!r} in its meta, not a finite score; pass the engine a scorer")
    return float(score)


@dataclass
class RewardModelCreditAssigner:
    """Combines the weights of `inner_assigner` with the score of each rollout; without an inner
    assigner the base is 1 at every step.

    The score is `rollout.meta[rm_score_key]`, used unchanged at every step of the rollout. There is
    no baseline: if all scores are positive, the modes that add them increase the probability of
    every answer. To compare scores within their group instead, use them as rewards
    (`RewardModelReward`) with `GroupNormalizedReturn`.
    """

    mode: CombineMode = "bonus"
    rm_coeff: float = 1.0
    alpha: float = 0.5
    rm_score_key: str = "rm_score"
    inner_assigner: CreditAssigner | None = None

    def __post_init__(self) -> None:
        check_value("mode", self.mode, choices=get_args(CombineMode))

    def compute(self, rollouts: Sequence[Rollout]) -> TokenWeights:
        """Return the weights. Raises DataError for a rollout without a score."""
        inner = self.inner_assigner.compute(rollouts) if self.inner_assigner is not None else None
        weights: TokenWeights = {}
        for rollout in rollouts:
            score = read_score(rollout, self.rm_score_key)
            for step in rollout.steps:
                key = (rollout.id, step.index)
                base = 1.0 if inner is None else inner[key]
                scale, offset = score_coefficients(self.mode, score, rm_coeff=self.rm_coeff, alpha=self.alpha)
                weights[key] = scale * base + offset
        return weights
