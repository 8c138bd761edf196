"""The batch source of a run that over-samples groups or filters them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludic.forwarding import forward_members
from ludic.recipes.over_sampling import build_group_filter, choose_lag
from ludic.recipes.schema import Recipe
from ludic.runs.batch_logs import BatchLogs, remove_sizes
from ludic.runs.directory import RunDirectory
from ludic.runs.rollouts import TrainingRequests
from ludic.training.batching.source import BATCH_NUMBER, BatchSourceBase
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.rollouts.ledger_state import check_number
from ludic.training.rollouts.log import append_rollouts
from ludic.training.rollouts.rolling import RollingBatchSource
from ludic.training.types import CreditAssigner, RolloutRequest, SAWBatch
from ludic.types import Rollout


def describe_over_sampling(recipe: Recipe) -> str:
    """One line of output that says how old samples can be, which over-sampling brings without being
    asked for."""
    section, lag = recipe.rollout, choose_lag(recipe)
    replaced = f"problems that {section.group_filter} rejects are replaced" if section.group_filter else ""
    oldest = f"answers are up to {lag + max(1, recipe.trainer.sync_every_steps) - 1} policy versions old" if lag else ""
    return f"Groups: {', '.join(part for part in (replaced, oldest) if part)}"


class RequestsByProblem:
    """The requests of a run, one problem at a time. Position p is problem p % prompts of batch p //
    prompts, in batches as they are without over-sampling."""

    def __init__(self, requests: TrainingRequests, prompts: int) -> None:
        self._requests, self._prompts = requests, prompts
        self._next = 0
        self._batch: tuple[int, list[RolloutRequest]] = (-1, [])

    def take(self) -> tuple[int, RolloutRequest]:
        self._next += 1
        return self._next - 1, self.at(self._next - 1)

    def at(self, position: int) -> RolloutRequest:
        number, offset = divmod(position, self._prompts)
        if number != self._batch[0]:
            self._batch = number, self._requests.list_problems(number)
        return self._batch[1][offset]

    def state_dict(self) -> dict[str, Any]:
        """The position, and a digest of the data if there is one."""
        return {**self._requests.state_dict(), "position": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError if the data has changed."""
        position = check_number("the position of the requests", state.get("position"))
        self._requests.load_state_dict(state)
        self._next, self._batch = position, (-1, [])


@forward_members("_rolling", ["use_check"])
class OverSampledRollouts(BatchSourceBase):
    """A `RollingBatchSource` with the settings of a recipe, which writes the rollouts of every
    `rollout.log_every`-th batch to the log in the run's folder. A batch's meta has its number.

    Batches that are trained again after a resume replace their lines in the logs."""

    shards_across_ranks = False

    def __init__(
        self,
        recipe: Recipe,
        engine: RolloutEngine,
        requests: TrainingRequests,
        credit: CreditAssigner,
        *,
        max_steps: int,
        directory: RunDirectory,
    ) -> None:
        section = recipe.rollout
        self._requests, self._log, self._every = requests, directory.rollouts, section.log_every
        self._logs = BatchLogs(directory)
        self._rolling = RollingBatchSource(
            engine=engine,
            requests=RequestsByProblem(requests, section.prompts),
            groups_per_batch=section.prompts,
            group_size=section.group_size,
            credit_assigner=credit,
            over_sampling_factor=section.over_sampling_factor,
            max_lag=section.max_lag,
            order=section.order,
            group_filter=build_group_filter(recipe),
            max_steps=max_steps,
            concurrency=section.concurrency,
            patience=section.patience,
            outage_patience_s=section.outage_patience_s,
            seed=recipe.seed,
            on_rollouts=self._write,
        )
        self.max_lag, self.overlaps = self._rolling.max_lag, self._rolling.overlaps

    async def next_batch(self) -> SAWBatch:
        number = self._rolling.num_batches
        self._requests.begin_batch(number)
        batch = await self._rolling.next_batch()
        batch.meta[BATCH_NUMBER] = number
        return batch

    def limit(self, num_batches: int) -> None:
        """Say how many more batches the run needs."""
        self._rolling.limit(num_batches)

    def state_dict(self) -> dict[str, Any]:
        return {**self._rolling.state_dict(), **self._logs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rolling.load_state_dict(remove_sizes(state))
        self._logs.load_state_dict(state)

    async def aclose(self) -> None:
        await self._rolling.aclose()

    def _write(self, number: int, rollouts: list[Rollout]) -> None:
        if self._every > 0 and number % self._every == 0:
            append_rollouts(self._log, rollouts)
