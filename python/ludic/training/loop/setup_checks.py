"""Checks that the parts of a trainer fit together, before a model is built or a rollout played."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import nn

from ludic.errors import ConfigError
from ludic.training import ranks
from ludic.training.batching.source import as_batch_source
from ludic.training.config import TrainerConfig
from ludic.training.loop.early_stopping import check_early_stopping
from ludic.training.stats import Reducer, check_reducers
from ludic.training.types import BatchSource

logger = logging.getLogger(__name__)


def check_setup(
    cfg: TrainerConfig, reducers: Mapping[str, Reducer], publisher: object, evaluator: object, batch_source: BatchSource
) -> None:
    """Raise ConfigError for settings or parts that contradict each other."""
    cfg.validate()
    check_early_stopping(cfg)
    check_reducers(reducers)
    check_publisher(cfg, publisher)
    check_evaluator(cfg, evaluator)
    check_lag(cfg, as_batch_source(batch_source).max_lag)
    check_ranks(batch_source)


def check_backend(cfg: TrainerConfig, backend: object, *, checkpoints: bool) -> None:
    """Raise ConfigError if the backend lacks a method that this run will call."""
    needed = ["forward_backward", "optim_step"]
    if checkpoints:
        needed += ["save", "load"]
    elif cfg.early_stopping_patience:
        needed += ["snapshot_weights", "restore_weights"]
    missing = [name for name in needed if not callable(getattr(backend, name, None))]
    if missing:
        raise ConfigError(
            f"backend ({type(backend).__name__}) has no {', '.join(missing)}, which this run needs; see TrainingBackend"
        )


def check_publisher(cfg: TrainerConfig, publisher: object) -> None:
    """Raise ConfigError for `sync_every_steps` > 1 without a publisher. 1, the default, only
    gives a warning."""
    if publisher is not None or not cfg.was_set("sync_every_steps") or cfg.sync_every_steps == 0:
        return
    if cfg.sync_every_steps > 1:
        raise ConfigError(
            f"sync_every_steps ({cfg.sync_every_steps}) needs a PolicyPublisher; pass publisher=, or sync_every_steps=0"
        )
    logger.warning("sync_every_steps=1 without a PolicyPublisher: nothing is published; pass publisher=, or sync_every_steps=0")


def check_evaluator(cfg: TrainerConfig, evaluator: object) -> None:
    """Warn if evaluations are configured and there is no evaluator. Training does not need one."""
    if evaluator is None and (cfg.eval_at_start or cfg.eval_every_n_steps):
        logger.warning("eval_at_start and eval_every_n_steps without an evaluator: nothing is evaluated; pass evaluator=")


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


def check_ranks(source: BatchSource) -> None:
    """Raise ConfigError for a source that gives all ranks the same samples, which would compute the
    same gradient several times, unless the trainer divides them. Warn if the source does not
    say."""
    if not ranks.is_distributed() or as_batch_source(source).divided_by_trainer:
        return
    name, world = type(source).__name__, ranks.world_size()
    shared = as_batch_source(source).shards_across_ranks
    if shared is False:
        raise ConfigError(
            f"batch_source ({name}) gives each of {world} ranks the same prompts; wrap it in SharedBatches, which divides them over the "
            "ranks, or give each rank its own prompts and seeds in requests_fn and set shards_across_ranks=True"
        )
    if shared is None and ranks.rank() == 0:
        logger.warning(
            "%s does not say whether each of the %d ranks gets its own samples; if all get the same, each gradient is computed %d "
            "times. Set shards_across_ranks = True on it if ranks get different samples, else wrap it in SharedBatches",
            name,
            world,
            world,
        )


def require_model(model: nn.Module | None) -> nn.Module:
    """`model`. Raises ConfigError if there is none in this process."""
    if model is None:
        raise ConfigError("the trainer has no model in this process; pass model=, or leave what needs it to the backend")
    return model
