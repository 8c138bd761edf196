"""What of a trainer's parts does not go together: said before a model is built or a sample is
played."""

from __future__ import annotations

import logging

from ludic.errors import ConfigError
from ludic.training import ranks
from ludic.training.batching.source import as_batch_source
from ludic.training.config import TrainerConfig
from ludic.training.loop.schedule import depends_on_total
from ludic.training.types import BatchSource

logger = logging.getLogger(__name__)


def check_publisher(cfg: TrainerConfig, publisher: object) -> None:
    """Publishing every step is the default, so that written out it asks for nothing new; any
    other cadence does."""
    if publisher is not None or not cfg.given("sync_every_steps") or cfg.sync_every_steps == 0:
        return
    if cfg.sync_every_steps > 1:
        raise ConfigError(
            f"sync_every_steps ({cfg.sync_every_steps}) needs a PolicyPublisher; pass publisher=, or sync_every_steps=0"
        )
    logger.warning("sync_every_steps=1 without a PolicyPublisher: nothing is published; pass publisher=, or sync_every_steps=0")


def check_evaluator(cfg: TrainerConfig, evaluator: object) -> None:
    """Training can go on without what only measures it."""
    if evaluator is None and (cfg.eval_at_start or cfg.eval_every_n_steps):
        logger.warning("eval_at_start and eval_every_n_steps without an evaluator: nothing is evaluated; pass evaluator=")


def check_lag(cfg: TrainerConfig, ahead: int) -> None:
    """`ahead`: how many batches the source begins before they are asked for."""
    oldest = ahead + max(1, cfg.sync_every_steps) - 1
    if ahead and cfg.max_lag is not None and cfg.max_lag < oldest:
        raise ConfigError(
            f"max_lag ({cfg.max_lag}) would drop batches that are begun {ahead} ahead with sync_every_steps "
            f"({cfg.sync_every_steps}) and are up to {oldest} versions old; raise it to {oldest}, or begin fewer ahead"
        )


def check_ranks(source: BatchSource) -> None:
    """Ranks that are given the same samples compute one gradient several times."""
    if not ranks.is_distributed():
        return
    name, world = type(source).__name__, ranks.world_size()
    shared = as_batch_source(source).shards_across_ranks
    if shared is False:
        raise ConfigError(
            f"batch_source ({name}) gives each of {world} ranks the same prompts; let requests_fn give each rank prompts and seeds of its "
            "own and say so with shards_across_ranks=True, play on one rank, or train on recorded rollouts (OfflineBatchSource), which "
            "ranks share out"
        )
    if shared is None and ranks.rank() == 0:
        logger.warning(
            "%s does not say whether each of the %d ranks gets samples of its own; if all get the same, each gradient is computed %d "
            "times for nothing. Set shards_across_ranks = True on it once it shares them out",
            name,
            world,
            world,
        )


def warn_of_endless_schedule(cfg: TrainerConfig, total_steps: int) -> None:
    """Where nobody said how long the run is."""
    if depends_on_total(cfg):
        logger.warning(
            "lr_scheduler_type=%s is stretched over %s steps, for nobody said how many there are: pass total_training_steps to Trainer, "
            "or num_steps to train()",
            cfg.lr_scheduler_type,
            f"{total_steps:,}",
        )
