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
from ludic.training.loop.staleness import check_lag
from ludic.training.reducers import Reducer
from ludic.training.stats import check_reducers
from ludic.training.types import BatchSource

logger = logging.getLogger(__name__)


def check_setup(
    cfg: TrainerConfig, reducers: Mapping[str, Reducer], publisher: object, evaluator: object, batch_source: BatchSource
) -> None:
    """Raise ConfigError for settings or parts that contradict each other. Warn of settings without
    effect."""
    cfg.validate()
    check_early_stopping(cfg)
    check_reducers(reducers)
    if cfg.offload and (publisher is None or cfg.sync_every_steps != 1):
        raise ConfigError(
            f"sync_every_steps ({cfg.sync_every_steps}) must be 1, with a publisher: with offload weights leave the device to be published"
        )
    if publisher is None and cfg.was_set("sync_every_steps") and cfg.sync_every_steps > 1:
        raise ConfigError(f"sync_every_steps ({cfg.sync_every_steps}) needs a PolicyPublisher; pass publisher= or set it to 0")
    if publisher is None and cfg.was_set("sync_every_steps") and cfg.sync_every_steps == 1:
        logger.warning(
            "sync_every_steps=1 without a PolicyPublisher: nothing is published; pass publisher=, or sync_every_steps=0"
        )
    if evaluator is None and (cfg.eval_at_start or cfg.eval_every_n_steps):
        logger.warning("eval_at_start and eval_every_n_steps without an evaluator: nothing is evaluated; pass evaluator=")
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
        raise ConfigError(f"backend ({type(backend).__name__}) has no {', '.join(missing)}; see TrainingBackend")


def check_ranks(source: BatchSource) -> None:
    """Raise ConfigError for a source that gives all ranks the same samples, which would compute the
    same gradient several times, unless the trainer divides them. Warn if the source does not
    say."""
    if not ranks.is_distributed() or as_batch_source(source).divided_by_trainer:
        return
    name, world = type(source).__name__, ranks.world_size()
    if ranks.context() is not None:
        raise ConfigError(
            f"batch_source ({name}) gives each rank its own samples, and ranks share rows; wrap it in SharedBatches"
        )
    shared = as_batch_source(source).shards_across_ranks
    if shared is False:
        raise ConfigError(f"batch_source ({name}) gives each of {world} ranks the same prompts; wrap it in SharedBatches")
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
