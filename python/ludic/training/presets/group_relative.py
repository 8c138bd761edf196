"""Algorithms that compare the answers to a prompt with each other and clip a ratio."""

from __future__ import annotations

from ludic.errors import ConfigError
from ludic.training.algorithm import RLAlgorithm, validate_actor_logps
from ludic.training.credit_assignment import OverlongPenalty, Scale
from ludic.training.group_credit import PassAtKReturn
from ludic.training.loss import (
    ClippedSurrogateLoss,
    Correction,
    GMPOLoss,
    Normalizer,
    SAPOLoss,
    TokenClippedSurrogateLoss,
    resolve_correction,
)
from ludic.training.loss.reference_kl import KLLevel
from ludic.training.loss.statistics import Estimator
from ludic.training.presets.preprocess import add_reference_kl, check_comparable, check_ratios, group_return
from ludic.training.types import CreditAssigner


def make_grpo(
    *,
    group_size: int,
    group_normalize_adv: bool = True,
    normalize: Scale = "population",
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
    reference_kl: float = 0.0,
    kl_estimator: Estimator = "k3",
    kl_level: KLLevel = "token",
) -> RLAlgorithm:
    """GRPO (arXiv:2402.03300): group-normalised returns, clipping per token.

    `reference_kl` above 0 adds the paper's penalty towards a frozen reference (`ReferenceKLLoss`
    with `kl_estimator` and `kl_level`), inside the mean of the policy loss as in its eq. 3,
    whichever it is; controllers change it as the coefficient `beta`.
    """
    loss = TokenClippedSurrogateLoss(clip_eps_low, clip_eps_high, length_normalize, ratio_clip, normalizer)
    penalised, coefficients = add_reference_kl(loss, reference_kl, kl_estimator, kl_level)
    credit = group_return(group_size, group_normalize_adv, positive_only, normalize)
    checks = check_ratios(drop_zero_weight, drop_zero_weight_eps)
    return RLAlgorithm(name, credit, penalised, checks, resolve_correction(correction), coefficients=coefficients)


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
    reference_kl: float = 0.0,
    kl_estimator: Estimator = "k3",
    kl_level: KLLevel = "token",
) -> RLAlgorithm:
    """Dr. GRPO (arXiv:2503.20783): GRPO without division by the group's standard deviation.

    `reference_kl`, `kl_estimator` and `kl_level`: as in `make_grpo`.
    """
    loss = TokenClippedSurrogateLoss(clip_eps_low, clip_eps_high, length_normalize, ratio_clip)
    penalised, coefficients = add_reference_kl(loss, reference_kl, kl_estimator, kl_level)
    credit = group_return(group_size, normalize_adv=False, positive_only=positive_only)
    checks = check_ratios(drop_zero_weight, drop_zero_weight_eps)
    return RLAlgorithm(name, credit, penalised, checks, resolve_correction(correction), coefficients=coefficients)


def make_dapo(
    *,
    group_size: int,
    normalize: Scale = "population",
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.28,
    max_completion_tokens: int | None = None,
    overlong_buffer_tokens: int | None = None,
    overlong_factor: float = 1.0,
    filter_zvp: bool = True,
    zvp_filter_eps: float = 1e-6,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "dapo",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """DAPO (arXiv:2503.14476): GRPO with a higher upper clip, one mean over all tokens of the
    batch, without groups of zero variance, and with a penalty for answers close to the token limit.

    The penalty is `OverlongPenalty(max_completion_tokens, overlong_buffer_tokens,
    overlong_factor)`. It needs `max_completion_tokens`, the `max_tokens` of sampling; without it
    there is no penalty. `overlong_buffer_tokens` is by default a fifth of it, as in the paper
    (4,096 of 20,480). Departure from the paper: dropped groups are not replaced by new samples.
    """
    credit: CreditAssigner = group_return(group_size, normalize_adv=True, normalize=normalize)
    if max_completion_tokens is not None:
        buffer = max_completion_tokens // 5 if overlong_buffer_tokens is None else overlong_buffer_tokens
        credit = OverlongPenalty(credit, max_completion_tokens, buffer, overlong_factor)
    elif overlong_buffer_tokens is not None:
        raise ConfigError(f"overlong_buffer_tokens ({overlong_buffer_tokens}) counts back from max_completion_tokens; set both")
    loss = TokenClippedSurrogateLoss(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, normalizer="tokens")
    checks = check_ratios(drop_zero_weight, drop_zero_weight_eps, flat_groups_eps=zvp_filter_eps if filter_zvp else None)
    return RLAlgorithm(name, credit, loss, checks, resolve_correction(correction))


def make_gspo(
    *,
    group_size: int,
    group_normalize_adv: bool = True,
    normalize: Scale = "population",
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
    """GSPO (arXiv:2507.18071): group-normalised returns, one clipped ratio per sequence."""
    credit = group_return(group_size, group_normalize_adv, positive_only, normalize)
    loss = ClippedSurrogateLoss(clip_eps_low, clip_eps_high, length_normalize=length_normalize, ratio_clip=ratio_clip)
    checks = check_ratios(drop_zero_weight, drop_zero_weight_eps)
    return RLAlgorithm(name, credit, loss, checks, resolve_correction(correction))


def make_sapo(
    *,
    group_size: int,
    group_normalize_adv: bool = True,
    normalize: Scale = "population",
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
    credit = group_return(group_size, group_normalize_adv, positive_only, normalize)
    loss = SAPOLoss(tau_pos, tau_neg, length_normalize, normalizer)
    checks = check_ratios(drop_zero_weight, drop_zero_weight_eps)
    return RLAlgorithm(name, credit, loss, checks, resolve_correction(correction))


def make_gmpo(
    *,
    group_size: int,
    group_normalize_adv: bool = True,
    normalize: Scale = "population",
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
    """GMPO (arXiv:2507.20673): group-normalised returns, the geometric mean of clipped token
    ratios."""
    credit = group_return(group_size, group_normalize_adv, positive_only, normalize)
    loss = GMPOLoss(clip_eps_low, clip_eps_high, length_normalize, ratio_clip)
    checks = check_ratios(drop_zero_weight, drop_zero_weight_eps)
    return RLAlgorithm(name, credit, loss, checks, resolve_correction(correction))


def make_pass_at_k(
    *,
    group_size: int,
    k: int = 2,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.28,
    normalizer: Normalizer = "tokens",
    name: str = "pass_at_k",
    correction: Correction | str | None = None,
) -> RLAlgorithm:
    """Pass@k training (arXiv:2508.10751) with its analytic advantages, for rewards of 0 and 1: one
    of `k` answers must be right. As in the paper, the loss is DAPO's, without its filter and its
    penalty. The default of `k`, the least that differs from GRPO, is ours."""
    loss = TokenClippedSurrogateLoss(clip_eps_low, clip_eps_high, normalizer=normalizer)
    credit = PassAtKReturn(check_comparable(group_size), k)
    return RLAlgorithm(name, credit, loss, validate_actor_logps, resolve_correction(correction))
