"""Staleness: samples that were drawn with older weights than the weights of the training step.

The version of the weights is the number of steps taken (`TrainerState.current_step`). A sample has
the version that it was drawn with as `meta["policy_version"]`, if the sampler reported one. Samples
are behind if batches are begun ahead (`batching.overlapped`, `rollouts.batch_selection`), if actors
send them (`training.queue`), or if a checkpoint had them. `TrainerConfig.max_lag` bounds by how
many versions.
"""

from __future__ import annotations

from collections.abc import Sequence

from ludic.errors import ConfigError
from ludic.training.config import TrainerConfig
from ludic.training.types import SAWItem


def drop_stale(items: Sequence[SAWItem], step: int, max_lag: int | None) -> list[SAWItem]:
    """The samples that are at most `max_lag` versions behind `step`, and those without a version.
    `max_lag` None means all.

    Example: in step 7 with `max_lag` 2, samples of the versions 4 and 5: the second is kept.
    """
    versions = [item.meta.get("policy_version") for item in items]
    pairs = zip(items, versions, strict=True)
    return [item for item, version in pairs if max_lag is None or version is None or step - version <= max_lag]


def measure_lag(items: Sequence[SAWItem], step: int) -> float | None:
    """The mean number of versions between the samples and `step`; None if no version is known."""
    versions = [item.meta["policy_version"] for item in items if item.meta.get("policy_version") is not None]
    return step - sum(versions) / len(versions) if versions else None


def check_lag(cfg: TrainerConfig, ahead: int) -> None:
    """Raise ConfigError for a `max_lag` that would drop the batches that the source begins `ahead`.

    Example: 1 batch ahead, published every 2 steps: a batch is up to 1 + 2 - 1 = 2 versions old.
    """
    oldest = ahead + max(1, cfg.sync_every_steps) - 1
    if ahead and cfg.max_lag is not None and cfg.max_lag < oldest:
        raise ConfigError(
            f"max_lag ({cfg.max_lag}) would drop batches that are begun {ahead} ahead with sync_every_steps "
            f"({cfg.sync_every_steps}) and are up to {oldest} versions old; raise it to {oldest}, or begin fewer ahead"
        )
