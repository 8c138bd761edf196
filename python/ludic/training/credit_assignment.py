"""Credit: how the rewards of rollouts become one weight for each step. Plain float64 arithmetic, no
torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ludic.errors import ConfigError, DataError
from ludic.training.types import CreditAssigner, RolloutStepKey
from ludic.types import Rollout, Step, group_of

Weights = dict[RolloutStepKey, float]
"""(rollout id, step index) -> weight."""


@dataclass
class MonteCarloReturn:
    """G_t = r_t + gamma G_{t+1}: the discounted sum of rewards from each step on."""

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
class PerStepReward:
    """Each step's own reward."""

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return {(rollout.id, step.index): float(step.reward) for rollout in rollouts for step in rollout.steps}


@dataclass
class EpisodicReturn:
    """The undiscounted return of the episode, at every step."""

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return _weights_by_step(rollouts, [_episode_return(rollout) for rollout in rollouts])


@dataclass
class ConstantCredit:
    """The same weight at every step: supervised fine-tuning."""

    value: float = 1.0

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return _weights_by_step(rollouts, [self.value] * len(rollouts))


@dataclass
class GroupNormalizedReturn:
    """A_i = R_i - mean(R of its group), at every step of rollout i (GRPO, arXiv:2402.03300, section
    4.1).

    Steps, in this order: centre; clamp at 0 if `positive_only`; divide by (population standard
    deviation of the group's advantages + `eps`) if `normalize_adv`. A group is the rollouts with
    one `meta["request_meta"]["group_id"]` and, with several agents, one `agent_id`. A group of
    equal returns gets exactly 0. With `allow_partial` a group may be smaller than `group_size`, for
    engines that lose rollouts; a larger one is always an error. With `leave_one_out` a return is
    compared with the mean of the others (RLOO, arXiv:2402.14740), which multiplies the advantage by
    G / (G - 1).

    Example: returns [1, 0, 0, 1] have mean 0.5 and advantages [0.5, -0.5, -0.5, 0.5]; normalised
    they are [1, -1, -1, 1].
    """

    group_size: int
    normalize_adv: bool = False
    positive_only: bool = False
    eps: float = 1e-8
    allow_partial: bool = False
    leave_one_out: bool = False

    def __post_init__(self) -> None:
        _check_group_size(self.group_size)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        advantages = np.zeros(len(rollouts))
        for members in _group_positions(rollouts, self.group_size, allow_partial=self.allow_partial):
            advantage = _subtract_mean([_episode_return(rollouts[i]) for i in members])
            if self.leave_one_out and len(members) > 1:
                advantage = advantage * (len(members) / (len(members) - 1))
            if self.positive_only:
                advantage = np.maximum(advantage, 0.0)
            if self.normalize_adv:
                advantage = advantage / (advantage.std() + self.eps)
            advantages[members] = advantage
        return _weights_by_step(rollouts, advantages.tolist())


@dataclass
class HybridNormalizedReturn:
    """A_i = (R_i - mean(R of its group)) / (std of all centred returns of the batch + eps)
    (ScaleRL, arXiv:2510.13786).

    The population standard deviation is over rollouts, one value each. `positive_only` clamps at 0
    last.
    """

    group_size: int
    eps: float = 1e-8
    positive_only: bool = False
    allow_partial: bool = False

    def __post_init__(self) -> None:
        _check_group_size(self.group_size)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        advantages = np.zeros(len(rollouts))
        for members in _group_positions(rollouts, self.group_size, allow_partial=self.allow_partial):
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
    """The credit of `inner` after a penalty on answers close to the token limit (DAPO,
    arXiv:2503.14476, soft overlong punishment).

    An answer of n sampled tokens loses factor * clamp((n - (max_tokens - buffer_tokens)) /
    buffer_tokens, 0, 1) of its reward. Example: with max_tokens=100 and buffer_tokens=20, 80 tokens
    cost 0, 90 cost 0.5 and 100 cost 1. Only the credit sees the penalty; the rewards of the
    rollouts, which are logged, do not change.
    """

    inner: CreditAssigner
    max_tokens: int
    """`max_tokens` of sampling: the length of an answer that was cut off."""
    buffer_tokens: int
    """The penalty rises over this many tokens before the limit. 0: no penalty."""
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.buffer_tokens <= self.max_tokens:
            raise ConfigError(f"buffer_tokens ({self.buffer_tokens}) must be between 0 and max_tokens ({self.max_tokens})")
        if self.factor < 0:
            raise ConfigError(f"factor ({self.factor}) must be >= 0: it is subtracted from the reward")

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        """Raises DataError for a step without a token trace, whose length is unknown."""
        return self.inner.compute([self._penalise(rollout) for rollout in rollouts])

    def _penalise(self, rollout: Rollout) -> Rollout:
        steps = [replace(step, reward=step.reward - self._penalty(rollout, step)) for step in rollout.steps]
        return replace(rollout, steps=steps)

    def _penalty(self, rollout: Rollout, step: Step) -> float:
        if step.trace is None:
            raise DataError(
                f"step {step.index} of rollout {rollout.id} has no token trace, so its length is not known; "
                "sample with ReturnSpec.for_rl()"
            )
        over = len(step.trace.completion_token_ids) - (self.max_tokens - self.buffer_tokens)
        return self.factor * min(1.0, over / self.buffer_tokens) if over > 0 and self.buffer_tokens else 0.0


def _episode_return(rollout: Rollout) -> float:
    """Sum of the rewards, rounded once: the same rewards in another order give the same return, so
    their group's credit is exactly 0. Raises DataError for rewards that are not finite."""
    rewards = [step.reward for step in rollout.steps]
    if not all(map(math.isfinite, rewards)):
        raise DataError(f"the rewards of rollout {rollout.id} are {rewards}; rewards must be finite")
    return math.fsum(rewards)


def _subtract_mean(returns: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Returns minus their mean; exactly 0 if all are equal, whatever the rounding of the mean."""
    values = np.asarray(returns, dtype=np.float64)
    if np.all(values == values[0]):
        return np.zeros_like(values)
    return values - values.mean()


def _group_positions(rollouts: Sequence[Rollout], group_size: int, *, allow_partial: bool) -> list[list[int]]:
    """Positions of the members of each group, in order of first appearance. Where an episode has
    several agents, each is compared with itself in the other episodes: the rollouts of one
    `meta["agent_id"]` are a group of their own."""
    groups: dict[tuple[object, object], list[int]] = {}
    for position, rollout in enumerate(rollouts):
        group = group_of(rollout.meta)
        if group is None:
            raise DataError(
                f"rollout {rollout.id} is missing group_id in meta['request_meta']; expand requests with GRPORequestStrategy"
            )
        groups.setdefault((group, rollout.meta.get("agent_id")), []).append(position)
    for (group, agent), members in groups.items():
        if len(members) > group_size or (len(members) < group_size and not allow_partial):
            raise DataError(
                f"Group size mismatch: group {group}{_agent_suffix(agent)} has {len(members)} rollouts, group_size is {group_size}; "
                "use the same number in GRPORequestStrategy, or allow_partial=True for groups that lost rollouts"
            )
    return list(groups.values())


def _agent_suffix(agent: object) -> str:
    return "" if agent is None else f" of agent {agent}"


def _weights_by_step(rollouts: Sequence[Rollout], values: Sequence[float]) -> Weights:
    """One value for all steps of a rollout."""
    return {
        (rollout.id, step.index): float(value) for rollout, value in zip(rollouts, values, strict=True) for step in rollout.steps
    }


def _check_group_size(group_size: int) -> None:
    if group_size <= 0:
        raise ConfigError(f"group_size must be positive, got {group_size}")
