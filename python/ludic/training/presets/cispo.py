"""CISPO and ScaleRL: algorithms that clip the importance weight, so every token has a gradient."""

from __future__ import annotations

from ludic.training.algorithm import RLAlgorithm
from ludic.training.credit_assignment import HybridNormalizedReturn, Scale
from ludic.training.loss import CISPOLoss, CompositeLoss, Correction, Loss, LossTerm, Normalizer, TokenKLLoss, resolve_correction
from ludic.training.loss.statistics import Estimator
from ludic.training.presets.preprocess import add_reference_kl, check_comparable, check_ratios, group_return, token_mean


def make_cispo(
    *,
    group_size: int,
    group_normalize_adv: bool = True,
    normalize: Scale = "population",
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
    reference_kl: float = 0.0,
) -> RLAlgorithm:
    """CISPO (MiniMax-M1, arXiv:2506.13585): group-normalised returns and clipped importance
    weights.

    `kl_coeff` above 0 adds `TokenKLLoss`, a KL penalty towards the old policy. With `kl_estimator`
    "k1", the default, its gradient is zero in expectation while the policy equals the old policy:
    it has an effect only when ratios differ from 1. "k2" and "k3" always have an effect.
    `reference_kl` above 0 adds `ReferenceKLLoss`, a k3 penalty towards a frozen reference;
    controllers change it as the coefficient `beta`.
    """
    loss = CISPOLoss(clip_eps_low, clip_eps_high, length_normalize, normalizer)
    penalised, coefficients = add_reference_kl(add_kl(loss, kl_coeff, kl_estimator), reference_kl)
    credit = group_return(group_size, group_normalize_adv, positive_only, normalize)
    checks = check_ratios(drop_zero_weight, drop_zero_weight_eps)
    return RLAlgorithm(name, credit, penalised, checks, resolve_correction(correction), coefficients=coefficients)


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
    reference_kl: float = 0.0,
) -> RLAlgorithm:
    """ScaleRL (arXiv:2510.13786): returns minus the mean of their group, divided by the standard
    deviation over the batch; the CISPO loss; groups without variance are dropped.

    `kl_coeff`, `kl_estimator` and `reference_kl`: as in `make_cispo`.
    """
    loss = CISPOLoss(clip_eps_low, clip_eps_high, length_normalize, normalizer)
    penalised, coefficients = add_reference_kl(add_kl(loss, kl_coeff, kl_estimator), reference_kl)
    credit = HybridNormalizedReturn(group_size=check_comparable(group_size), positive_only=positive_only)
    checks = check_ratios(drop_zero_weight, drop_zero_weight_eps, flat_groups_eps=zvp_filter_eps if filter_zvp else None)
    return RLAlgorithm(name, credit, penalised, checks, resolve_correction(correction), coefficients=coefficients)


def add_kl(loss: CISPOLoss, coeff: float, estimator: Estimator = "k1") -> Loss:
    """Return `loss`, with a KL term of the same mean added if `coeff` is not 0."""
    if coeff == 0:
        return loss
    kl = TokenKLLoss(coeff=coeff, estimator=estimator, **token_mean(loss))
    return CompositeLoss(terms=[LossTerm("cispo", loss), LossTerm("kl", kl)])
