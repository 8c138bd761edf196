"""Scores in credit: the five modes by hand."""

import math

import numpy as np
import pytest
from reward_models import rollout

from ludic.errors import ConfigError, DataError
from ludic.training import (
    CISPOLoss,
    CompositeLoss,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    MonteCarloReturn,
    RewardModelCreditAssigner,
    TokenClippedSurrogateLoss,
)
from ludic.training.algorithm import make_grpo_with_rm, make_scalerl_with_rm


def scored_rollout(name, score, *, reward=0.0, turns=1, key="rm_score"):
    made = rollout(name, *[("o", "a")] * turns, reward=reward)
    made.meta[key] = score
    return made


# inner weight 3 (the return), score 0.5
@pytest.mark.parametrize(
    ("mode", "expected"),
    [("replace", 0.5), ("add", 3.5), ("multiply", 1.5), ("weighted", 0.25 * 3 + 0.75 * 0.5), ("bonus", 3 + 2 * 0.5)],
)
def test_each_mode_follows_its_formula(mode, expected):
    assigner = RewardModelCreditAssigner(mode, rm_coeff=2.0, alpha=0.25, inner_assigner=MonteCarloReturn())
    assert assigner.compute([scored_rollout("r", 0.5, reward=3.0)]) == {("r", 0): expected}


def test_without_an_inner_assigner_every_step_has_base_credit_one():
    weights = RewardModelCreditAssigner("bonus").compute([scored_rollout("r", 0.5, reward=9.0, turns=3)])
    assert weights == {("r", 0): 1.5, ("r", 1): 1.5, ("r", 2): 1.5}


def test_every_step_keeps_its_own_inner_weight():
    assigner = RewardModelCreditAssigner("add", inner_assigner=MonteCarloReturn(gamma=0.5))
    assert assigner.compute([scored_rollout("r", 1.0, reward=4.0, turns=3)]) == {("r", 0): 2.0, ("r", 1): 3.0, ("r", 2): 5.0}


def test_the_score_is_read_from_its_key():
    assigner = RewardModelCreditAssigner("replace", rm_score_key="helpful")
    assert assigner.compute([scored_rollout("r", np.float32(0.25), key="helpful")]) == {("r", 0): 0.25}


@pytest.mark.parametrize("score", [None, math.nan, math.inf, "0.5", True])
def test_a_rollout_without_a_score_is_an_error_and_not_a_score_of_zero(score):
    with pytest.raises(DataError, match="rollout r has rm_score"):
        RewardModelCreditAssigner().compute([scored_rollout("r", score)])
    with pytest.raises(ValueError, match="rm_score"):
        RewardModelCreditAssigner().compute([rollout("r", ("o", "a"))])


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match=r"mode .'mean'. .*replace, add, multiply, weighted, bonus"):
        RewardModelCreditAssigner(mode="mean")


def test_grpo_with_a_reward_model_adds_the_score_to_the_centred_return():
    algorithm = make_grpo_with_rm(group_size=2)
    assert (algorithm.name, algorithm.credit_assigner.mode, algorithm.credit_assigner.rm_coeff) == ("grpo_rm", "bonus", 1.0)
    # returns 1 and 0: centred 0.5 and -0.5, not divided by their standard deviation; scores 0.2 and
    # 0.9
    weights = algorithm.credit_assigner.compute([scored_rollout("a", 0.2, reward=1.0), scored_rollout("b", 0.9)])
    assert weights == {("a", 0): pytest.approx(0.7), ("b", 0): pytest.approx(0.4)}
    assert isinstance(algorithm.credit_assigner.inner_assigner, GroupNormalizedReturn)
    loss = algorithm.loss
    assert isinstance(loss, TokenClippedSurrogateLoss)
    assert (loss.clip_eps_low, loss.clip_eps_high, loss.length_normalize) == (0.2, 0.27, False)


def test_scalerl_with_a_reward_model_adds_a_tenth_of_the_score():
    algorithm = make_scalerl_with_rm(group_size=2)
    assert (algorithm.name, algorithm.credit_assigner.rm_coeff) == ("scalerl_rm", 0.1)
    assert isinstance(algorithm.credit_assigner.inner_assigner, HybridNormalizedReturn)
    # centred +-0.5, standard deviation 0.5: +-1, plus a tenth of the scores
    weights = algorithm.credit_assigner.compute([scored_rollout("a", 0.2, reward=1.0), scored_rollout("b", 0.9)])
    assert weights == {("a", 0): pytest.approx(1.02), ("b", 0): pytest.approx(-0.91)}
    assert isinstance(algorithm.loss, CISPOLoss)
    assert (algorithm.loss.clip_eps_low, algorithm.loss.clip_eps_high) == (0.2, 0.28)
    assert isinstance(make_scalerl_with_rm(group_size=2, kl_coeff=0.1).loss, CompositeLoss)
