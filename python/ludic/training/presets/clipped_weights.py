"""Algorithms that clip the importance weight and keep the gradient of every token: CISPO and
ScaleRL."""

from __future__ import annotations

from ludic.training.algorithm import RLAlgorithm, compose_preprocess
from ludic.training.credit_assignment import GroupNormalizedReturn, HybridNormalizedReturn
from ludic.training.loss import CISPOLoss, CompositeLoss, Correction, Loss, LossTerm, Normalizer, TokenKLLoss, correction_of
from ludic.training.loss.kl import Estimator
from ludic.training.presets.groups import compared
from ludic.training.presets.preprocess import check_ratios, filter_flat_groups


def make_cispo(
    *,
    group_size: int,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    clip_eps_low: float = 1e6,
    clip_eps_high: float = 0.2,
    length_normalize: bool = True,
    kl_coeff: float = 0.0,
    kl_estimator: Estimator = "k1",
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    normalizer: Normalizer = "samples",
    name: str = "cispo",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """CISPO (MiniMax-M1, arXiv:2506.13585): group-normalised returns and clipped importance
    weights.

    `kl_coeff` above 0 adds `TokenKLLoss`, a penalty on the distance from the policy that sampled.
    `kl_estimator` "k1" is the documented default; its gradient is zero in expectation on the
    policy's own samples, so that it acts only once ratios leave
    1. "k2" and "k3" always act.
    """
    loss = CISPOLoss(
        clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, length_normalize=length_normalize, normalizer=normalizer
    )
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(
            group_size=compared(group_size), normalize_adv=group_normalize_adv, positive_only=positive_only
        ),
        loss=add_kl(loss, kl_coeff, length_normalize, kl_estimator),
        preprocess=check_ratios(drop_zero_weight, drop_zero_weight_eps),
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
    kl_estimator: Estimator = "k1",
    filter_zvp: bool = True,
    zvp_filter_eps: float = 1e-6,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    normalizer: Normalizer = "samples",
    name: str = "scalerl",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """ScaleRL (arXiv:2510.13786): returns centred by group and scaled by batch, CISPO, groups
    without variance left out.

    `kl_coeff` and `kl_estimator` are those of `make_cispo`.
    """
    loss = CISPOLoss(
        clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, length_normalize=length_normalize, normalizer=normalizer
    )
    ratios = check_ratios(drop_zero_weight, drop_zero_weight_eps)
    return RLAlgorithm(
        name=name,
        credit_assigner=HybridNormalizedReturn(group_size=compared(group_size), positive_only=positive_only),
        loss=add_kl(loss, kl_coeff, length_normalize, kl_estimator),
        preprocess=compose_preprocess(filter_flat_groups(zvp_filter_eps), ratios) if filter_zvp else ratios,
        correction=correction_of(correction),
    )


def add_kl(loss: CISPOLoss, coeff: float, length_normalize: bool, estimator: Estimator = "k1") -> Loss:
    """The loss alone, or with a KL term."""
    if coeff == 0:
        return loss
    kl = TokenKLLoss(coeff=coeff, length_normalize=length_normalize, estimator=estimator)
    return CompositeLoss(terms=[LossTerm("cispo", loss), LossTerm("kl", kl)])
