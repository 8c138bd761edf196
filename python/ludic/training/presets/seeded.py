"""InfoSeed as a part of an algorithm: the term of its loss, and the samples with a seed."""

from __future__ import annotations

from dataclasses import replace

from ludic.training.algorithm import RLAlgorithm, compose_preprocess
from ludic.training.info_seed.settings import InfoSeed
from ludic.training.info_seed.untagged import SEED_ID, seed_of, without_tags
from ludic.training.loss import CompositeLoss, Loss, LossTerm, SeedClassificationLoss, SeedContrastiveLoss
from ludic.training.loss.info_seed import FixedSeedHead
from ludic.training.types import SAWItem


def add_info_seed(algorithm: RLAlgorithm, info_seed: InfoSeed | None) -> RLAlgorithm:
    """The algorithm for batches of `SeedPrompts`: the prompts of seeded samples lose their tags,
    their log-probabilities are computed anew, and the loss has the term `seed`. None: unchanged."""
    if info_seed is None:
        return algorithm
    loss = algorithm.loss
    terms = list(loss.terms) if isinstance(loss, CompositeLoss) else [LossTerm("policy", loss)]
    checks = [] if algorithm.preprocess is None else [algorithm.preprocess]
    return replace(
        algorithm,
        loss=CompositeLoss([*terms, LossTerm("seed", _make_loss(info_seed))]),
        preprocess=compose_preprocess(without_tags, *checks),
        sample_columns={**algorithm.sample_columns, SEED_ID: read_seed},
        rescores=is_seeded,
    )


def read_seed(item: SAWItem) -> float:
    """The seed of a sample; 0 if it has none."""
    return float(seed_of(item.meta))


def is_seeded(item: SAWItem) -> bool:
    """Whether the prompt of a sample named a seed when it was sampled."""
    return seed_of(item.meta) > 0


def _make_loss(info_seed: InfoSeed) -> Loss:
    """The loss of the settings. Its term has the weight 1: `coeff` is in the loss."""
    if info_seed.loss == "infonce":
        return SeedContrastiveLoss(info_seed.coeff, info_seed.temperature, info_seed.pooling)
    head = FixedSeedHead(info_seed.num_seeds, info_seed.temperature)
    return SeedClassificationLoss(head, info_seed.coeff, info_seed.pooling)
