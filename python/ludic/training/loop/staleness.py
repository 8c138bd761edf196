"""Fetches batches until one has samples to train on, and drops stale samples, which were drawn with
older weights than the weights of the training step.

The version of the weights is the number of steps taken (`TrainerState.current_step`). A sample has
the version that it was drawn with as `meta["policy_version"]`, if the sampler reported one. Samples
are behind if batches are begun ahead (`batching.overlapped`, `rollouts.batch_selection`), if actors
send them (`training.queue`), or if a checkpoint had them. `TrainerConfig.max_lag` bounds by how
many versions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from ludic.columns import Column
from ludic.errors import ConfigError, DataError, EmptyBatchError, StopRequested
from ludic.event_loop import await_if_needed
from ludic.models.wrappers import count_vocabulary
from ludic.training import ranks, watchdog
from ludic.training.batching.mini_batches import MacroBatch
from ludic.training.batching.rank_plans import SAME_BATCH, RankShare, all_have_samples
from ludic.training.batching.sample_codec import view_columns
from ludic.training.batching.source import BATCH_NUMBER
from ludic.training.config import TrainerConfig
from ludic.training.loop.state import TrainerState
from ludic.training.loop.step_record import PhaseTimer
from ludic.training.rollouts.episodes import SampleCheck
from ludic.training.stats import distinct_rollouts
from ludic.training.types import SAWBatch, SAWItem
from ludic.types import read_list, stored

logger = logging.getLogger(__name__)


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
    every = cfg.sync_every_steps
    oldest = ahead + max(1, every) - 1
    if ahead and cfg.max_lag is not None and cfg.max_lag < oldest:
        raise ConfigError(f"max_lag ({cfg.max_lag}) must be >= {oldest} at {ahead} batches ahead and sync_every_steps ({every})")


class BatchFetcher:
    """Gets batches from the source, drops stale samples, and preprocesses and truncates the rest.

    After an empty batch it fetches the next, up to `max_empty_batches` in all. `ingest` makes a
    macro-batch of samples. The meta of the batch gets its number, which is the step's if the source
    does not number its batches, and, if the run publishes weights, `policy_lag`.
    """

    def __init__(self, run: TrainerState, ingest: Callable[[Sequence[SAWItem]], MacroBatch]) -> None:
        self._run, self._ingest = run, ingest
        self._signal, self._check, self._is_checked = SignalWatch(), SampleCheck(), False

    async def fetch(self, step: int, timer: PhaseTimer) -> tuple[SAWBatch, MacroBatch]:
        """The next batch with samples to train on in step `step`. Raises EmptyBatchError after
        `max_empty_batches` empty ones in a row, and StopRequested if `should_stop` is true."""
        fetched = stale = 0
        model = getattr(self._run.backend, "model", None)  # a user's backend may have none, or a stand-in
        self._check.vocab_size = (count_vocabulary(model) or None) if isinstance(model, nn.Module) else None
        self._check.version = step
        for attempt in range(self._run.cfg.max_empty_batches):
            source = self._run.source
            self._is_checked = source.use_check(self._check)
            if self._run.should_stop is not None and self._run.should_stop():
                raise StopRequested("the run was asked to stop")
            with timer.phase("rollout"), watchdog.phase("generation"):
                source_batch = await source.next_batch()
            with timer.phase("batching"):
                items = drop_stale(source_batch.items, step, self._run.cfg.max_lag)
                batch = SAWBatch(items, source_batch.meta)
                fetched, stale = fetched + len(source_batch.items), stale + len(source_batch.items) - len(items)
                batch, macro = await self._prepare(batch)
            if macro.items:
                if not self._run.algo.reads_teacher:  # who gives a signal without a reward
                    self._signal.count_batch(macro.items)
                batch.items = macro.items
                batch.meta["effective_rollouts"] = distinct_rollouts(macro.items)
                batch.meta[BATCH_NUMBER] = source_batch.meta.get(BATCH_NUMBER, step)
                lag = measure_lag(macro.items, step)
                if lag is not None and self._run.sync_every_steps:
                    batch.meta["policy_lag"] = lag
                return batch, macro
            too_long = self._describe_long_prompts(source_batch.items)
            if attempt == 0:  # the error has the number of the following ones
                logger.warning(
                    "a batch of %d samples has none to train on%s; fetching the next", len(source_batch.items), too_long
                )
        cfg = self._run.cfg
        raise EmptyBatchError(
            f"{cfg.max_empty_batches} batches in a row had no sample to train on: of {fetched} samples, {stale} were older than "
            f"max_lag ({cfg.max_lag}), the rest was filtered or too long{too_long}; check the filters or raise max_empty_batches"
        )

    async def _prepare(self, batch: SAWBatch) -> tuple[SAWBatch, MacroBatch]:
        """The samples after preprocessing, and the macro-batch of them. With a batch that all ranks
        have, all of them must come to the same samples, and the error of one is raised on all. Only
        preprocessing, which is the user's function, can make them differ."""
        if not (self._run.source.divided_by_trainer and ranks.is_distributed()):
            return await self._preprocess(batch)
        prepared: tuple[SAWBatch, MacroBatch] | None = None
        digest: int | None = None
        failure: Exception | None = None
        try:
            prepared = await self._preprocess(batch)
            digest = prepared[1].digest() if self._run.algo.preprocess is not None else SAME_BATCH
        except Exception as error:
            failure = error
        if not all_have_samples(digest, self._run.cfg.model_device):
            with ranks.agree("preparing a batch"):
                if failure is not None:
                    raise failure
        assert prepared is not None
        return prepared[0], replace(prepared[1], share=RankShare.of_this_rank())

    async def _preprocess(self, batch: SAWBatch) -> tuple[SAWBatch, MacroBatch]:
        """Raises DataError for a sample that the model cannot be trained on."""
        if self._run.algo.preprocess is not None and batch.items:
            batch = await await_if_needed(self._run.algo.preprocess(batch))
        macro = self._ingest(batch.items)
        if self._is_checked or not macro.items:
            return batch, macro
        columns = {name: values.view(Column) for name, values in view_columns(macro.table.to_bytes()).items()}
        is_sound = self._check.find_fault({}, columns["input_ids"], columns.get("actor_logps")) is None  # all in one call
        for row, item in enumerate(macro.items):
            logps = None if item.actor_logps is None else stored(item.actor_logps, "token_logps")
            if fault := self._check.find_fault(item.meta, *(() if is_sound else (stored(item, "input_ids"), logps))):
                raise DataError(f"sample {macro.name(row)} has {fault}")
        return batch, macro

    def _describe_long_prompts(self, items: Sequence[SAWItem]) -> str:
        """A hint if every prompt alone is longer than `max_seq_len`, else "".

        Example: `action_mask` [0, 0, 1] is a prompt of 2 tokens; `max_seq_len` 2 leaves no answer.
        """
        masks = [read_list(item, "action_mask") for item in items]
        prompts = [list(mask).index(1) for mask in masks if any(mask)]
        if not prompts or min(prompts) < self._run.cfg.max_seq_len:
            return ""
        return f" (the shortest prompt has {min(prompts)} tokens, and max_seq_len is {self._run.cfg.max_seq_len}: raise that)"


PATIENCE = 10
"""Batches without a signal in a row before the warning. A few are normal: problems may be too
easy or too hard."""


class SignalWatch:
    """Counts batches in a row in which all samples have weight 0, and warns once, after
    `PATIENCE` of them."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def count_batch(self, items: Sequence[SAWItem]) -> None:
        """Count a batch to train on."""
        self.in_a_row = 0 if any(item.largest_weight for item in items) else self.in_a_row + 1
        if self.in_a_row == PATIENCE:
            logger.warning(
                "all samples of %d batches in a row have weight 0: the rewards teach nothing. Members of a group that earn the same "
                "have no advantage; look at the rewards, at answers that are cut off, at group_size and at the temperature",
                PATIENCE,
            )
