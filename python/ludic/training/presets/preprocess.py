"""What presets share: the preprocessing of batches, credit compared within groups, the KL penalty
towards a reference, and InfoSeed as a part of an algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ludic.errors import ConfigError, check_value
from ludic.training.algorithm import (
    PreprocessFn,
    RLAlgorithm,
    compose_preprocess,
    drop_zero_weight_samples,
    filter_zero_variance_groups,
    validate_actor_logps,
)
from ludic.training.coefficients import Coefficient
from ludic.training.credit_assignment import GroupNormalizedReturn, Scale
from ludic.training.info_seed.seed_tags import SEED_ID, InfoSeed, seed_of, without_tags
from ludic.training.loss import CompositeLoss, Loss, LossTerm, ReferenceKLLoss, SeedClassificationLoss, SeedContrastiveLoss
from ludic.training.loss.info_seed import FixedSeedHead
from ludic.training.loss.reference_kl import KLLevel
from ludic.training.loss.statistics import Estimator
from ludic.training.types import SAWItem


def drop_zero_weights(drop: bool, eps: float) -> PreprocessFn | None:
    """Return `drop_zero_weight_samples` with this `eps`; None if `drop` is False."""
    return partial(drop_zero_weight_samples, eps=eps) if drop else None


def check_ratios(drop: bool, eps: float, *, flat_groups_eps: float | None = None) -> PreprocessFn:
    """Return a function that checks that every sample has the sampled log-probabilities that ratios
    need.

    Before the check it drops, if `flat_groups_eps` is set, the groups in which the standard
    deviation of the weights is at most that, and then, if `drop` is True, the samples with
    |weight| <= `eps`: dropped samples need no log-probabilities.
    """
    filter_groups = None if flat_groups_eps is None else partial(filter_zero_variance_groups, eps=flat_groups_eps)
    steps = [step for step in (filter_groups, drop_zero_weights(drop, eps)) if step is not None]
    return compose_preprocess(*steps, validate_actor_logps) if steps else validate_actor_logps


def group_return(
    group_size: int, normalize_adv: bool, positive_only: bool = False, normalize: Scale = "population"
) -> GroupNormalizedReturn:
    """Return the credit assigner for groups of at least 2."""
    return GroupNormalizedReturn(check_comparable(group_size), normalize_adv, positive_only, normalize=normalize)


def check_comparable(group_size: int) -> int:
    """Return `group_size`. Raises ConfigError for 1: an answer that is compared only with itself
    always has advantage 0."""
    if group_size == 1:
        raise ConfigError("group_size (1) must be at least 2 to compare answers; raise it, or use make_reinforce_baseline")
    return group_size


def add_reference_kl(
    loss: Loss, coeff: float, estimator: Estimator = "k3", level: KLLevel = "token"
) -> tuple[Loss, Mapping[str, Coefficient]]:
    """Return the loss and the coefficients of the algorithm: with `coeff` above 0, `loss` with a
    `ReferenceKLLoss`, whose coefficient is `beta`; with 0, `loss` itself and none. The terms of a
    composite loss stay terms. The penalty has the mean of the first term, the policy loss."""
    check_value("reference_kl", coeff, "0 is no penalty", least=0, below=math.inf)
    if coeff == 0:
        return loss, {}
    beta = Coefficient(coeff)
    terms = loss.terms if isinstance(loss, CompositeLoss) else [LossTerm("policy", loss)]
    penalty = ReferenceKLLoss(beta, estimator, level, **token_mean(terms[0].loss))
    return CompositeLoss([*terms, LossTerm("reference_kl", penalty)]), {"beta": beta}


def token_mean(policy: Loss) -> dict[str, Any]:
    """The arguments that give a penalty per token the mean of the policy loss."""
    return {name: getattr(policy, name) for name in ("length_normalize", "normalizer")}


def add_info_seed(algorithm: RLAlgorithm, info_seed: InfoSeed | None) -> RLAlgorithm:
    """The algorithm for batches of `SeedPrompts`: the prompts of seeded samples lose their tags,
    their log-probabilities are computed anew, and the loss has the term `seed`. With None it is
    unchanged."""
    if info_seed is None:
        return algorithm
    loss = algorithm.loss
    terms = list(loss.terms) if isinstance(loss, CompositeLoss) else [LossTerm("policy", loss)]
    checks = [] if algorithm.preprocess is None else [algorithm.preprocess]
    seed: Loss  # of a term with the weight 1: `coeff` is in the loss
    if info_seed.loss == "infonce":
        seed = SeedContrastiveLoss(info_seed.coeff, info_seed.temperature, info_seed.pooling)
    else:
        head = FixedSeedHead(info_seed.num_seeds, info_seed.temperature)
        seed = SeedClassificationLoss(head, info_seed.coeff, info_seed.pooling)
    return replace(
        algorithm,
        loss=CompositeLoss([*terms, LossTerm("seed", seed)]),
        preprocess=compose_preprocess(without_tags, *checks),
        sample_columns={**algorithm.sample_columns, SEED_ID: lambda item: float(seed_of(item.meta))},
        rescores=is_seeded,
    )


def is_seeded(item: SAWItem) -> bool:
    """Whether the prompt of a sample named a seed when it was sampled."""
    return seed_of(item.meta) > 0
