"""Known algorithms by name: each function builds the credit assigner, the loss and the preprocessing of one.

`correction` is for samples of another engine or an older policy: an object of `loss.correction`, or its name (truncated, masked, icepop).
"""

from __future__ import annotations

from ludic.errors import ConfigError
from ludic.training.algorithm import (
    PreprocessFn,
    RLAlgorithm,
    compose_preprocess,
    drop_zero_weight_samples,
    filter_zero_variance_groups,
    validate_actor_logps,
)
from ludic.training.credit_assignment import (
    ConstantCredit,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    MonteCarloReturn,
)
from ludic.training.loss import (
    BradleyTerryLoss,
    CISPOLoss,
    ClippedSurrogateLoss,
    CompositeLoss,
    Correction,
    GMPOLoss,
    Loss,
    LossTerm,
    MaskedCausalLMCrossEntropyLoss,
    Normalizer,
    ReinforceBaselineLoss,
    ReinforceLoss,
    SAPOLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    correction_of,
)
from ludic.training.loss.preference import RegularizationType, ScoreType
from ludic.training.reward_credit import CombineMode, RewardModelCreditAssigner
from ludic.training.types import SAWBatch

__all__ = [
    "make_bradley_terry",
    "make_cispo",
    "make_dr_grpo",
    "make_gmpo",
    "make_grpo",
    "make_grpo_with_rm",
    "make_gspo",
    "make_reinforce",
    "make_reinforce_baseline",
    "make_sapo",
    "make_scalerl",
    "make_scalerl_with_rm",
    "make_sft",
]


def make_reinforce(
    *,
    gamma: float = 1.0,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "reinforce",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """REINFORCE: Monte Carlo returns, importance-weighted log-probabilities (Williams 1992)."""
    return RLAlgorithm(
        name=name,
        credit_assigner=MonteCarloReturn(gamma=gamma),
        loss=ReinforceLoss(),
        preprocess=_dropping(drop_zero_weight, drop_zero_weight_eps),
        correction=correction_of(correction),
    )


def make_reinforce_baseline(
    *,
    gamma: float = 1.0,
    normalize_adv: bool = False,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "reinforce_baseline",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """REINFORCE with the batch's mean return as baseline, divided by its spread if `normalize_adv`."""
    return RLAlgorithm(
        name=name,
        credit_assigner=MonteCarloReturn(gamma=gamma),
        loss=ReinforceBaselineLoss(normalize=normalize_adv),
        preprocess=_dropping(drop_zero_weight, drop_zero_weight_eps),
        correction=correction_of(correction),
    )


def make_grpo(
    *,
    group_size: int,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.27,
    length_normalize: bool = False,
    ratio_clip: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    normalizer: Normalizer = "samples",
    name: str = "grpo",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """GRPO (arXiv:2402.03300): group-normalised returns, token-level clipping."""
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(
            group_size=group_size, normalize_adv=group_normalize_adv, positive_only=positive_only
        ),
        loss=TokenClippedSurrogateLoss(
            clip_eps_low=clip_eps_low,
            clip_eps_high=clip_eps_high,
            length_normalize=length_normalize,
            ratio_clip=ratio_clip,
            normalizer=normalizer,
        ),
        preprocess=_with_ratios(drop_zero_weight, drop_zero_weight_eps),
        correction=correction_of(correction),
    )


def make_dr_grpo(
    *,
    group_size: int,
    positive_only: bool = False,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.27,
    length_normalize: bool = False,
    ratio_clip: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "dr_grpo",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """Dr. GRPO (arXiv:2503.20783): GRPO without dividing by the group's spread."""
    return make_grpo(
        group_size=group_size,
        group_normalize_adv=False,
        positive_only=positive_only,
        clip_eps_low=clip_eps_low,
        clip_eps_high=clip_eps_high,
        length_normalize=length_normalize,
        ratio_clip=ratio_clip,
        drop_zero_weight=drop_zero_weight,
        drop_zero_weight_eps=drop_zero_weight_eps,
        name=name,
        correction=correction,
    )


def make_gspo(
    *,
    group_size: int,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    clip_eps_low: float = 3e-4,
    clip_eps_high: float = 4e-4,
    length_normalize: bool = True,
    ratio_clip: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "gspo",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """GSPO (arXiv:2507.18071): group-normalised returns, the ratio and the clip of whole sequences."""
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(
            group_size=group_size, normalize_adv=group_normalize_adv, positive_only=positive_only
        ),
        loss=ClippedSurrogateLoss(
            clip_eps_low=clip_eps_low,
            clip_eps_high=clip_eps_high,
            length_normalize=length_normalize,
            ratio_clip=ratio_clip,
        ),
        preprocess=_with_ratios(drop_zero_weight, drop_zero_weight_eps),
        correction=correction_of(correction),
    )


def make_cispo(
    *,
    group_size: int,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    clip_eps_low: float = 1e6,
    clip_eps_high: float = 0.2,
    length_normalize: bool = True,
    kl_coeff: float = 0.0,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    normalizer: Normalizer = "samples",
    name: str = "cispo",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """CISPO (arXiv:2506.13585): group-normalised returns, clipped importance weights, and a KL term if `kl_coeff` is not 0."""
    loss = CISPOLoss(
        clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, length_normalize=length_normalize, normalizer=normalizer
    )
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(
            group_size=group_size, normalize_adv=group_normalize_adv, positive_only=positive_only
        ),
        loss=_with_kl(loss, kl_coeff, length_normalize),
        preprocess=_with_ratios(drop_zero_weight, drop_zero_weight_eps),
        correction=correction_of(correction),
    )


def make_scalerl(
    *,
    group_size: int,
    positive_only: bool = False,
    clip_eps_low: float = 0.20,
    clip_eps_high: float = 0.28,
    length_normalize: bool = True,
    kl_coeff: float = 0.0,
    filter_zvp: bool = True,
    zvp_filter_eps: float = 1e-6,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    normalizer: Normalizer = "samples",
    name: str = "scalerl",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """ScaleRL (arXiv:2510.13786): returns centred by group and scaled by batch, CISPO, groups without variance left out."""
    loss = CISPOLoss(
        clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, length_normalize=length_normalize, normalizer=normalizer
    )
    ratios = _with_ratios(drop_zero_weight, drop_zero_weight_eps)
    return RLAlgorithm(
        name=name,
        credit_assigner=HybridNormalizedReturn(group_size=group_size, positive_only=positive_only),
        loss=_with_kl(loss, kl_coeff, length_normalize),
        preprocess=compose_preprocess(_filtering_groups(zvp_filter_eps), ratios) if filter_zvp else ratios,
        correction=correction_of(correction),
    )


def make_sapo(
    *,
    group_size: int,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    length_normalize: bool = False,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    normalizer: Normalizer = "samples",
    name: str = "sapo",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """SAPO (arXiv:2511.20347): group-normalised returns, a smooth gate on token ratios."""
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(
            group_size=group_size, normalize_adv=group_normalize_adv, positive_only=positive_only
        ),
        loss=SAPOLoss(tau_pos=tau_pos, tau_neg=tau_neg, length_normalize=length_normalize, normalizer=normalizer),
        preprocess=_with_ratios(drop_zero_weight, drop_zero_weight_eps),
        correction=correction_of(correction),
    )


def make_gmpo(
    *,
    group_size: int,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    clip_eps_low: float = 0.4,
    clip_eps_high: float = 0.4,
    length_normalize: bool = True,
    ratio_clip: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "gmpo",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """GMPO (arXiv:2507.20673): group-normalised returns, the geometric mean of clipped token ratios."""
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(
            group_size=group_size, normalize_adv=group_normalize_adv, positive_only=positive_only
        ),
        loss=GMPOLoss(
            clip_eps_low=clip_eps_low,
            clip_eps_high=clip_eps_high,
            length_normalize=length_normalize,
            ratio_clip=ratio_clip,
        ),
        preprocess=_with_ratios(drop_zero_weight, drop_zero_weight_eps),
        correction=correction_of(correction),
    )


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
    """GRPO whose advantages are combined with the score that a `RewardModelScorer` gave the rollout."""
    inner = GroupNormalizedReturn(group_size=group_size, normalize_adv=group_normalize_adv, positive_only=positive_only)
    return RLAlgorithm(
        name=name,
        credit_assigner=RewardModelCreditAssigner(rm_mode, rm_coeff, rm_alpha, rm_score_key, inner),
        loss=TokenClippedSurrogateLoss(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, length_normalize=length_normalize),
        preprocess=_with_ratios(drop_zero_weight, drop_zero_weight_eps),
    )


def make_scalerl_with_rm(
    *,
    group_size: int,
    rm_mode: CombineMode = "bonus",
    rm_coeff: float = 0.1,
    rm_alpha: float = 0.5,
    rm_score_key: str = "rm_score",
    positive_only: bool = False,
    kl_coeff: float = 0.0,
    clip_eps_low: float = 0.20,
    clip_eps_high: float = 0.28,
    length_normalize: bool = True,
    filter_zvp: bool = True,
    zvp_filter_eps: float = 1e-6,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "scalerl_rm",
) -> RLAlgorithm:
    """ScaleRL whose advantages are combined with the score that a `RewardModelScorer` gave the rollout.

    `filter_zvp` leaves out the groups whose combined weights do not vary: one of equal returns and different scores stays.
    """
    inner = HybridNormalizedReturn(group_size=group_size, positive_only=positive_only)
    loss = CISPOLoss(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, length_normalize=length_normalize)
    ratios = _with_ratios(drop_zero_weight, drop_zero_weight_eps)
    return RLAlgorithm(
        name=name,
        credit_assigner=RewardModelCreditAssigner(rm_mode, rm_coeff, rm_alpha, rm_score_key, inner),
        loss=_with_kl(loss, kl_coeff, length_normalize),
        preprocess=compose_preprocess(_filtering_groups(zvp_filter_eps), ratios) if filter_zvp else ratios,
    )


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
) -> RLAlgorithm:
    """A reward model from preference pairs, for `RMTrainer`. `regularization_lambda` is another name of `lambda_regularization`."""
    if regularization_lambda is not None and lambda_regularization not in (0.0, regularization_lambda):
        raise ConfigError(
            f"lambda_regularization ({lambda_regularization}) and regularization_lambda ({regularization_lambda}) are two names of one "
            "setting; give one of them"
        )
    return RLAlgorithm(
        name=name,
        credit_assigner=ConstantCredit(1.0),
        loss=BradleyTerryLoss(
            beta=beta,
            score_type=score_type,
            regularization_lambda=lambda_regularization if regularization_lambda is None else regularization_lambda,
            regularization_type=regularization_type,
            label_smoothing=label_smoothing,
            score_regularization_lambda=score_regularization_lambda,
        ),
    )


def make_sft(*, length_normalize: bool = False, normalizer: Normalizer = "samples", name: str = "sft") -> RLAlgorithm:
    """Supervised fine-tuning: cross entropy on the action tokens, every sample with weight 1."""
    return RLAlgorithm(
        name=name,
        credit_assigner=ConstantCredit(value=1.0),
        loss=MaskedCausalLMCrossEntropyLoss(length_normalize=length_normalize, normalizer=normalizer),
    )


def _with_kl(loss: CISPOLoss, coeff: float, length_normalize: bool) -> Loss:
    """The loss alone, or with a KL term."""
    if coeff == 0:
        return loss
    kl = TokenKLLoss(coeff=coeff, length_normalize=length_normalize)
    return CompositeLoss(terms=[LossTerm("cispo", loss), LossTerm("kl", kl)])


def _filtering_groups(eps: float) -> PreprocessFn:
    def filter_groups(batch: SAWBatch) -> SAWBatch:
        return filter_zero_variance_groups(batch, eps=eps)

    return filter_groups


def _dropping(drop: bool, eps: float) -> PreprocessFn | None:
    if not drop:
        return None

    def drop_samples(batch: SAWBatch) -> SAWBatch:
        return drop_zero_weight_samples(batch, eps=eps)

    return drop_samples


def _with_ratios(drop: bool, eps: float) -> PreprocessFn:
    """Ratios need log-probabilities; samples that are dropped anyway do not."""
    dropping = _dropping(drop, eps)
    return validate_actor_logps if dropping is None else compose_preprocess(dropping, validate_actor_logps)
