"""MaxEnt-GRPO: listwise weights of the answers to a prompt, with an entropy term on the weights."""

from __future__ import annotations

from typing import Literal

from ludic.errors import ConfigError, check_value
from ludic.training.algorithm import RLAlgorithm, validate_actor_logps
from ludic.training.coefficients import Coefficient, as_coefficient
from ludic.training.credit_assignment import EpisodicReturn
from ludic.training.info_seed.seed_tags import InfoSeed
from ludic.training.loss import (
    CompositeLoss,
    Correction,
    ListwiseClipLoss,
    ListwiseLoss,
    LossTerm,
    Normalizer,
    ReferenceKLLoss,
    TokenClippedSurrogateLoss,
    resolve_correction,
)
from ludic.training.loss.listwise import RatioLevel
from ludic.training.loss.reference_kl import KLLevel
from ludic.training.loss.statistics import Estimator
from ludic.training.maxent.credit import Baseline, ListwiseCredit, Scale
from ludic.training.presets.preprocess import add_info_seed, check_comparable, token_mean

Form = Literal["surrogate", "likelihood"]


def make_maxent_grpo(
    *,
    group_size: int,
    tau: float | Coefficient = 0.1,
    beta: float | Coefficient = 0.0,
    form: Form = "surrogate",
    q_temperature: float = 1.0,
    q_epsilon: float = 1e-6,
    length_normalize_reference: bool = True,
    sampler_exponent: float = 1.0,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.27,
    length_normalize: bool = False,
    normalizer: Normalizer = "samples",
    kl_estimator: Estimator = "k3",
    kl_level: KLLevel = "token",
    clip_coeff: float = 0.0,
    clip_baseline: float | None = None,
    clip_ratio_level: RatioLevel = "sequence_mean",
    baseline: Baseline = "uniform",
    scale: Scale = "weights",
    info_seed: InfoSeed | None = None,
    allow_partial: bool = False,
    correction: Correction | str | None = None,
    name: str = "maxent_grpo",
) -> RLAlgorithm:
    """MaxEnt-GRPO (d'Aliberti 2026, liv-daliberti/maxent-grpo): the weights of the answers to a
    prompt are softmax((log q + beta r) / (tau + beta)), with q from rewards, r from a reference.

    `form="surrogate"`: these weights minus 1/K are the advantages of GRPO's clipped loss, to which
    `length_normalize` and `normalizer` belong. `form="likelihood"`, the document's: `ListwiseLoss`,
    and with `clip_coeff` above 0 `ListwiseClipLoss`. `beta` above 0 adds `ReferenceKLLoss`,
    with the mean of the surrogate; of the likelihood, as in the document, over all tokens.
    Departures, on by default: `sampler_exponent` shares weights among the best, `baseline`
    subtracts 1/K. `info_seed`: batches of `SeedPrompts`. `allow_partial`: groups may lack rollouts.
    """
    answers = check_comparable(group_size) + (info_seed.num_seeds if info_seed else 0)
    coefficients = {"tau": as_coefficient(tau)}
    if isinstance(beta, Coefficient) or beta > 0:  # a controller can raise a Coefficient from 0
        coefficients["beta"] = as_coefficient(beta)
    surrogate = TokenClippedSurrogateLoss(clip_eps_low, clip_eps_high, length_normalize, normalizer=normalizer)
    clip = ListwiseClipLoss(clip_coeff, clip_eps_low, clip_eps_high, clip_baseline, clip_ratio_level)
    terms = [LossTerm("policy", surrogate if _is_surrogate(form, clip_coeff, normalizer) else ListwiseLoss())]
    if clip_coeff:
        terms.append(LossTerm("clip", clip))
    if "beta" in coefficients:
        mean = token_mean(surrogate) if form == "surrogate" else {}
        terms.append(LossTerm("reference_kl", ReferenceKLLoss(coefficients["beta"], kl_estimator, kl_level, **mean)))
    algorithm = RLAlgorithm(
        name=name,
        credit_assigner=EpisodicReturn(answers, allow_partial),
        loss=CompositeLoss(terms) if len(terms) > 1 else terms[0].loss,
        preprocess=validate_actor_logps if form == "surrogate" or sampler_exponent > 0 or clip_coeff > 0 else None,
        correction=resolve_correction(correction),
        batch_credit=ListwiseCredit(
            group_size=answers,
            tau=coefficients["tau"],
            beta=coefficients.get("beta", beta),
            q_temperature=q_temperature,
            q_epsilon=q_epsilon,
            length_normalize_reference=length_normalize_reference,
            sampler_exponent=sampler_exponent,
            baseline=baseline,
            scale=scale,
            allow_partial=True,  # of groups that `credit_assigner` counted, samples may be dropped
        ),
        coefficients=coefficients,
    )
    return add_info_seed(algorithm, info_seed)


def _is_surrogate(form: str, clip_coeff: float, normalizer: Normalizer) -> bool:
    check_value("form", form, choices=("surrogate", "likelihood"))
    check_value("clip_coeff", clip_coeff, "0 is no clip term", least=0)
    if form == "surrogate" and clip_coeff:
        raise ConfigError(f"clip_coeff ({clip_coeff}) adds a clip term to form='likelihood'; the surrogate clips its own ratios")
    if form == "likelihood" and normalizer != "samples":
        raise ConfigError(f"normalizer ({normalizer!r}) is of form='surrogate'; the likelihood takes a mean over groups")
    return form == "surrogate"
