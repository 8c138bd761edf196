"""The trainer's side of a run with actors: batches of their groups, the versions that they sample
with, and the deletion of old versions once a checkpoint is saved.

    trainer --publish--> policy/version_N --announce--> queue --> actors
    trainer <--batches-- ActorBatches <---- entries --- queue <-- actors
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ludic.errors import CheckpointError, StopRequested
from ludic.event_loop import await_if_needed
from ludic.files.atomic import read_json
from ludic.files.checkpoints import STATE
from ludic.inference.client import PolicyPublisher, Publisher, Version, WeightSource, as_publisher
from ludic.recipes.actors import count_prompts_per_entry
from ludic.recipes.schema import Recipe
from ludic.runs.actors.policy_versions import PolicyVersions, list_versions
from ludic.runs.actors.queue import make_run_id, open_queue
from ludic.runs.actors.supervision import ActorProcesses
from ludic.runs.directory import RunDirectory
from ludic.runs.rollouts import BatchLogs
from ludic.runs.sampler import Sampler
from ludic.runs.stop_request import StopRequest
from ludic.training.batching.source import BATCH_NUMBER, BatchSourceBase
from ludic.training.queue.entries import EntryLimits
from ludic.training.queue.source import BatchFromGroups, QueueBatchSource
from ludic.training.rollouts.episodes import SampleCheck
from ludic.training.rollouts.log import RolloutLog
from ludic.training.types import CreditAssigner, SAWBatch
from ludic.user_objects import forward_members

logger = logging.getLogger(__name__)

STOP_CHECK_S = 0.2
"""How often a wait for actors looks whether the run was asked to stop."""


class ActorBatches(BatchSourceBase):
    """The batches of a run with actors.

    Its state is the state of the queue's source and the sizes of the logs: batches that are made
    again after a resume replace their lines. A wait for actors ends when the run is asked to stop,
    and when none is left.
    """

    shards_across_ranks = False

    def __init__(
        self,
        recipe: Recipe,
        directory: RunDirectory,
        checkpoints: Path,
        credit_assigner: CreditAssigner,
        stop: StopRequest,
        actors: ActorProcesses | None,
    ) -> None:
        per_entry, rollout = count_prompts_per_entry(recipe), recipe.rollout
        run_id = make_run_id(directory.path)
        self._checkpoints, self._stop, self._actors = checkpoints, stop, actors
        self._logs = BatchLogs(directory)
        self._to_batch = BatchFromGroups(
            rollouts_per_group=per_entry * rollout.group_size,
            credit_assigner=credit_assigner,
            log=RolloutLog(directory.rollouts, rollout.log_every),
            failures_path=directory.failed_episodes,
        )
        self._every = recipe.trainer.sync_every_steps or sys.maxsize
        self._queue = open_queue(recipe.queue, directory.path)
        self._source = QueueBatchSource(
            self._queue,
            run=run_id,
            groups_per_batch=rollout.prompts // per_entry,
            to_batch=self._to_batch,
            ahead=recipe.inference.batches_ahead,
            order="exact" if recipe.queue.order == "exact" else "arrival",
            max_lag=recipe.queue.max_lag,
            publish_every=self._every,
            patience_s=recipe.queue.patience_s,
            limits=EntryLimits(max_groups=per_entry),
        )
        self.max_lag, self.overlaps = self._source.max_lag, self._source.overlaps
        self._logged = self._logs.state_dict()
        """Sizes of the logs with the lines of all batches that were returned. A wait that ends may
        leave a thread that writes the lines of another one."""
        self._versions: PolicyVersions | None = None
        self._kept: list[tuple[int, int]] = []
        """First and last version that each kept checkpoint needs."""

    def use_check(self, check: SampleCheck) -> bool:
        return self._source.use_check(check)

    def follow(self, sampler: Sampler) -> Sampler:
        """The sampler, whose publisher also announces each version to actors."""
        assert sampler.publisher is not None
        self._versions = sampler.publisher if isinstance(sampler.publisher, PolicyVersions) else None
        return replace(sampler, publisher=_AnnouncingPublisher(sampler.publisher, self))

    def begin(self, step: int) -> None:
        """Continue at `step`: delete the versions of later steps, and ask for no version that is
        gone."""
        self._kept = list(_needed_versions(read_kept_metadata(self._checkpoints)))
        if self._versions is None:
            return
        self._versions.begin(step)
        there = {*list_versions(self._versions.root), self._round(step)}
        state = self._source.state_dict()
        lost = sorted({version for _, version in state["versions"]} - there)
        if lost:
            logger.warning("policy/version_%d is gone; its groups are sampled with the weights of step %d", lost[0], step)
            versions = [(batch, version if version in there else self._round(step)) for batch, version in state["versions"]]
            self._source.load_state_dict({**state, "versions": versions})

    async def next_batch(self) -> SAWBatch:
        """Raises StopRequested once a stop is requested, and LaunchError if no actor is left."""
        number, task = self._to_batch.batches, asyncio.ensure_future(self._source.next_batch())
        lost: list[asyncio.Future[Any]] = [] if self._actors is None else [self._actors.lost]
        try:
            while not task.done():
                await asyncio.wait([task, *lost], timeout=STOP_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    break
                if self._stop:
                    raise StopRequested("the run was asked to stop")
                if self._actors is not None and self._actors.lost.done():
                    raise self._actors.lost.result()
            batch = task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        batch.meta[BATCH_NUMBER] = number
        self._logged = self._logs.state_dict()
        if self._actors is not None:
            batch.meta.update(self._actors.measure())
        return batch

    async def publish(self, push: Callable[[int], Awaitable[None] | None], version: int) -> None:
        """Publish with `push(version)` and announce a version, if actors sample with it. A resumed
        run has versions that they do not, and the ones of its checkpoint."""
        rounded = self._round(version)
        if rounded == version or self._versions is None or rounded not in list_versions(self._versions.root):
            await await_if_needed(await asyncio.to_thread(push, rounded))
        await self._source.announce(version)
        if self._versions is not None:
            current = [(_oldest_needed(self._source.state_dict()), version)]
            await asyncio.to_thread(self._versions.keep_only, [*self._kept, *current])

    def _round(self, version: int) -> int:
        """The last version that is published, up to `version`."""
        return version - version % self._every

    async def checkpoint_saved(self) -> None:
        """Versions that no kept checkpoint needs are deleted with the next that is published."""
        self._kept = list(_needed_versions(read_kept_metadata(self._checkpoints)))
        await self._source.checkpoint_saved()

    def limit(self, num_batches: int) -> None:
        """Set how many more batches the run needs."""
        self._source.limit(num_batches)

    def state_dict(self) -> dict[str, Any]:
        return {**self._source.state_dict(), **self._logged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state)
        self._to_batch.batches = int(state["batch"])
        self._logs.load_state_dict(state)
        self._logged = self._logs.state_dict()

    async def close_queue(self) -> None:
        """The run is done: actors end."""
        await self._source.close_queue()

    async def aclose(self) -> None:
        await self._source.aclose()
        await asyncio.to_thread(self._queue.disconnect)


@forward_members("_inner", ["expect_change", "close", "timings", "takes_adapters"])
class _AnnouncingPublisher(Publisher):
    """Publishes with `inner`, and tells actors of the version."""

    def __init__(self, inner: PolicyPublisher, batches: ActorBatches) -> None:
        self._inner, self._batches = as_publisher(inner), batches

    async def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> None:
        await self._batches.publish(lambda number: self._inner.publish(state_dict, version=number), int(version or 0))

    async def publish_stream(self, weights: WeightSource, version: Version = None) -> None:
        await self._batches.publish(lambda number: self._inner.publish_stream(weights, version=number), int(version or 0))


def read_kept_metadata(checkpoints: Path) -> list[dict[str, Any]]:
    """The metadata of the checkpoints in the folder, without those that cannot be read."""
    states = []
    for path in checkpoints.glob(f"step_*/{STATE}"):
        with suppress(CheckpointError, OSError):
            states.append(read_json(path))
    return states


def _needed_versions(kept: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """First and last version that a run needs which is resumed from each of the checkpoints."""
    for metadata in kept:
        if "versions" in metadata.get("batch_source", {}):
            yield _oldest_needed(metadata["batch_source"]), int(metadata["step"])


def _oldest_needed(state: Mapping[str, Any]) -> int:
    """The oldest version that entries which are offered are sampled with. Example: versions
    [[7, 6], [8, 7]] of the batches 7 and 8 need 6."""
    return min([int(state["version"]), *(int(version) for _, version in state["versions"])])
