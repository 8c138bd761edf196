"""Reward models: training from preference pairs, and reinforcement learning with their scores.
Preferences without a reward model.
"""

from __future__ import annotations

from ludic.errors import ConfigError
from ludic.training.algorithm import RLAlgorithm
from ludic.training.credit_assignment import (
    CombineMode,
    ConstantCredit,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    RewardModelCreditAssigner,
)
from ludic.training.loss import BradleyTerryLoss, CISPOLoss, TokenClippedSurrogateLoss
from ludic.training.loss.base import ScoreType
from ludic.training.loss.dpo import DPOLoss, DPOLossType
from ludic.training.loss.kto import KTOLoss
from ludic.training.loss.preference import RegularizationType, ScoreRegularization
from ludic.training.loss.statistics import Estimator
from ludic.training.presets.cispo import add_kl
from ludic.training.presets.preprocess import check_ratios


def make_bradley_terry(
    *,
    beta: float = 1.0,
    score_type: ScoreType = "reward",
    name: str = "bradley_terry",
    lambda_regularization: float = 0.0,
    regularization_lambda: float | None = None,
    regularization_type: RegularizationType = "l2",
    label_smoothing: float = 0.0,
    score_regularization_lambda: float = 0.0,
    score_regularization_type: ScoreRegularization = "squares",
) -> RLAlgorithm:
    """The Bradley-Terry loss of preference pairs (Bradley and Terry 1952), for `RMTrainer`.

    `lambda_regularization` is an alias of `regularization_lambda`.
    """
    if regularization_lambda is not None and lambda_regularization not in (0.0, regularization_lambda):
        raise ConfigError(
            f"give lambda_regularization ({lambda_regularization}) or regularization_lambda ({regularization_lambda}), not both"
        )
    loss = BradleyTerryLoss(
        beta=beta,
        score_type=score_type,
        regularization_lambda=lambda_regularization if regularization_lambda is None else regularization_lambda,
        regularization_type=regularization_type,
        label_smoothing=label_smoothing,
        score_regularization_lambda=score_regularization_lambda,
        score_regularization_type=score_regularization_type,
    )
    return RLAlgorithm(name, ConstantCredit(1.0), loss)


def make_grpo_with_rm(
    *,
    group_size: int,
    rm_mode: CombineMode = "bonus",
    rm_coeff: float = 1.0,
    rm_alpha: float = 0.5,
    rm_score_key: str = "rm_score",
    group_normalize_adv: bool = False,
    positive_only: bool = False,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.27,
    length_normalize: bool = False,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "grpo_rm",
) -> RLAlgorithm:
    """GRPO (arXiv:2402.03300) with advantages that are combined with the rollout's score from a
    `RewardModelScorer`."""
    inner = GroupNormalizedReturn(group_size=group_size, normalize_adv=group_normalize_adv, positive_only=positive_only)
    credit = RewardModelCreditAssigner(rm_mode, rm_coeff, rm_alpha, rm_score_key, inner)
    loss = TokenClippedSurrogateLoss(clip_eps_low, clip_eps_high, length_normalize)
    return RLAlgorithm(name, credit, loss, check_ratios(drop_zero_weight, drop_zero_weight_eps))


def make_scalerl_with_rm(
    *,
    group_size: int,
    rm_mode: CombineMode = "bonus",
    rm_coeff: float = 0.1,
    rm_alpha: float = 0.5,
    rm_score_key: str = "rm_score",
    positive_only: bool = False,
    kl_coeff: float = 0.0,
    kl_estimator: Estimator = "k1",
    clip_eps_low: float = 0.20,
    clip_eps_high: float = 0.28,
    length_normalize: bool = True,
    filter_zvp: bool = True,
    zvp_filter_eps: float = 1e-6,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "scalerl_rm",
) -> RLAlgorithm:
    """ScaleRL (arXiv:2510.13786) with advantages that are combined with the rollout's score from a
    `RewardModelScorer`.

    `filter_zvp` drops the groups in which all combined weights are equal; a group with equal
    returns but different scores is kept.
    """
    inner = HybridNormalizedReturn(group_size=group_size, positive_only=positive_only)
    credit = RewardModelCreditAssigner(rm_mode, rm_coeff, rm_alpha, rm_score_key, inner)
    loss = add_kl(CISPOLoss(clip_eps_low, clip_eps_high, length_normalize), kl_coeff, kl_estimator)
    checks = check_ratios(drop_zero_weight, drop_zero_weight_eps, flat_groups_eps=zvp_filter_eps if filter_zvp else None)
    return RLAlgorithm(name, credit, loss, checks)


def make_dpo(
    *,
    beta: float = 0.1,
    loss_type: DPOLossType = "sigmoid",
    label_smoothing: float = 0.0,
    length_normalize: bool | None = None,
    nll_coeff: float = 0.0,
    cpo_alpha: float | None = None,
    simpo_gamma: float | None = None,
    name: str = "dpo",
) -> RLAlgorithm:
    """Direct preference optimization (arXiv:2305.18290) for `DPOTrainer`; with `loss_type` IPO,
    robust DPO, CPO, SimPO and ORPO. `DPOLoss` has the formulas and papers."""
    loss = DPOLoss(beta, loss_type, label_smoothing, length_normalize, nll_coeff, cpo_alpha, simpo_gamma)
    return RLAlgorithm(name, ConstantCredit(1.0), loss)


def make_kto(
    *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0, name: str = "kto"
) -> RLAlgorithm:
    """Kahneman-Tversky optimization (arXiv:2402.01306) for `DPOTrainer`, of pairs or of single
    answers. `KTOLoss` has the formula."""
    return RLAlgorithm(name, ConstantCredit(1.0), KTOLoss(beta, desirable_weight, undesirable_weight))
