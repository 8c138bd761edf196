"""Credit from the scores of a reward model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from ludic.errors import ConfigError, DataError
from ludic.training.types import CreditAssigner, RolloutStepKey
from ludic.types import Rollout

CombineMode = Literal["replace", "add", "multiply", "weighted", "bonus"]
"""How a score is combined with a base, which is a reward or a weight; see `combine_score`."""


def combine_score(mode: CombineMode, base: float, score: float, *, rm_coeff: float = 1.0, alpha: float = 0.5) -> float:
    """Combine a base and a score:

    - `replace`: score
    - `add`: base + score
    - `multiply`: base * score
    - `weighted`: alpha * base + (1 - alpha) * score
    - `bonus`: base + rm_coeff * score
    """
    scale, offset = score_coefficients(mode, score, rm_coeff=rm_coeff, alpha=alpha)
    return scale * base + offset


def score_coefficients(mode: CombineMode, score: float, *, rm_coeff: float = 1.0, alpha: float = 0.5) -> tuple[float, float]:
    """Return (scale, offset) such that `combine_score` is scale * base + offset."""
    match check_mode(mode):
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


def check_mode(mode: CombineMode) -> CombineMode:
    """Return `mode`. Raises ConfigError if it is unknown."""
    if mode not in get_args(CombineMode):
        raise ConfigError(f"unknown mode {mode!r}; it must be one of {', '.join(get_args(CombineMode))}")
    return mode


def read_score(rollout: Rollout, key: str) -> float:
    """Return the score that a `RewardModelScorer` wrote to the rollout's meta. Raises DataError
    unless it is a finite number."""
    score = rollout.meta.get(key)
    if isinstance(score, bool) or not isinstance(score, Real) or not math.isfinite(score):
        raise DataError(
            f"rollout {rollout.id} has {key}={score!r} in its meta; there must be a finite score: give the engine "
            "scorer=RewardModelScorer(...), or score the rollouts before credit is assigned"
        )
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
        check_mode(self.mode)

    def compute(self, rollouts: Sequence[Rollout]) -> dict[RolloutStepKey, float]:
        """Return the weights. Raises DataError for a rollout without a score."""
        inner = self.inner_assigner.compute(rollouts) if self.inner_assigner is not None else None
        weights: dict[RolloutStepKey, float] = {}
        for rollout in rollouts:
            score = read_score(rollout, self.rm_score_key)
            for step in rollout.steps:
                key = (rollout.id, step.index)
                base = 1.0 if inner is None else inner[key]
                weights[key] = combine_score(self.mode, base, score, rm_coeff=self.rm_coeff, alpha=self.alpha)
        return weights
