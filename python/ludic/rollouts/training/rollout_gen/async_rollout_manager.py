"""Batches of samples, generated concurrently, with more prompts in the air than a batch needs."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from ludic.errors import ConfigError, RolloutAborted, RolloutError
from ludic.rollouts.training.rollout_gen.buffered_prompts import BufferedPrompts
from ludic.rollouts.training.rollout_gen.generate_calls import check_reward_function
from ludic.rollouts.training.rollout_gen.rollout_generation import convert_to_batch, epoch_of, is_accepted
from ludic.rollouts.training.rollout_gen.sampling import MisuseError, Sampling
from ludic.rollouts.training.rollout_gen.saved_groups import (
    Member,
    SampleCodec,
    join_state,
    members_samples,
    split_state,
    state_of_samples,
)
from ludic.rollouts.training.types import RewardFn, RolloutBatch, RolloutConfig, Sample
from ludic.training.rollouts.group_filters import name_of_filter
from ludic.training.rollouts.group_ledger import Group, PoolCounts
from ludic.training.rollouts.group_pool import GroupBatch, GroupPool, Ticket
from ludic.training.rollouts.ledger_state import check_number, damaged

__all__ = ["AsyncRolloutManager", "RolloutAborted", "generate_rollout_batch"]

logger = logging.getLogger(__name__)

MOST_THREADS = 64
"""Calls at the same time of a `generate_fn` that is a plain function, unless `max_concurrency` is
set."""


class AsyncRolloutManager:
    """Generates batches of `batch_size` prompts with `n_samples_per_prompt` samples each.

    >>> async with AsyncRolloutManager(buffer, config) as manager:
    ...     batch = await manager.generate_batch()

    Each call of `config.generate_fn([prompt], **rollout_kwargs)` samples one member of a group,
    with `group_calls` all of it. `seeds=`, `partial=` and `weight_version=` are added where its
    signature names them: a seed for each prompt; the sample of a call that was interrupted, to be
    continued; the version of the weights. A coroutine function runs in the event loop, a plain one
    in a thread. What it returns is rewarded in the same call, and a group is filtered when it is
    whole.

    Inside `async with`, generation goes on between batches, unless `generate_while_training` is
    off. Outside, `generate_batch` ends the calls that it started. What is whole is kept either way.
    A thread cannot be stopped: if its call is cancelled it is let go, and runs on; without
    `generate_while_training`, `generate_batch` waits until it ends, for up to 30 s, and keeps what
    it returned.

    `GroupPool` has the rules of admission, hand-over, retries and abort. The manager runs on
    asyncio.

    `data_buffer`: a `DataBuffer`, or an object with `get_prompts(n)`, `save_state()` and
    `load_state(state)`. One with `position` and `at(position)` too has the prompts of unfinished
    groups found again by their positions; of another they are in the state, and must be JSON
    values: `state_dict` raises DataError for a prompt that is not.

    `partial_samples`: whole samples to begin with, such as those of a state.
    """

    def __init__(
        self,
        data_buffer: Any,
        config: RolloutConfig,
        partial_samples: Sequence[Sample] = (),
        rollout_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.data_buffer, self.config = data_buffer, config
        self._prompts = BufferedPrompts(data_buffer)
        most_kept = math.ceil(config.batch_size * config.over_sampling_factor) * config.n_samples_per_prompt
        self._sampling = Sampling(config, rollout_kwargs or {}, most_kept=most_kept)
        self._members_per_group = 1 if config.group_calls else config.n_samples_per_prompt
        concurrency = config.max_concurrency or (MOST_THREADS if self._sampling.runs_in_threads else None)
        self._pool = GroupPool(
            play=self._play,
            accept=self._accept,
            prompts=self._prompts,
            groups_per_batch=config.batch_size,
            members_per_group=self._members_per_group,
            over_sampling_factor=config.over_sampling_factor,
            max_lag=config.max_lag,
            order=config.order,
            max_retries=config.max_retries,
            max_concurrency=concurrency,
            patience=config.patience,
            outage_patience_s=config.outage_patience_s,
            on_exhausted=config.on_exhausted,
            seed=config.seed,
            codec=SampleCodec(config.n_samples_per_prompt if config.group_calls else None),
            explain=self._explain,
            prompts_in_state=not self._prompts.can_find,
        )
        self._misuse: BaseException | None = None
        self._is_aborted = False
        self.is_entered = False
        """Whether this is inside `async with`."""
        if partial_samples:
            self._pool.load_state_dict(self._state_of(partial_samples, step_count=0))
        if self._pool.max_lag:
            logger.info("prompts are trained at most max_lag=%d batches after they were begun", self._pool.max_lag)

    @property
    def max_lag(self) -> int:
        """Batches by which a prompt may be trained later than it was begun."""
        return self._pool.max_lag

    @property
    def step_count(self) -> int:
        """The number of batches so far."""
        return self._pool.num_batches

    @property
    def counts(self) -> PoolCounts:
        """The groups so far, by what became of them; `retried` counts calls."""
        return self._pool.counts

    @property
    def partial_samples(self) -> list[Sample]:
        """Copies of the samples of complete groups that no batch has taken yet."""
        return [Sample.from_dict(data) for data in split_state(self._pool.state_dict())[0]]

    def weights_changed(self, version: int) -> None:
        """Say that `generate_fn` samples with these weights from now on. Samples have the version
        at which their call began as `metadata["weight_version"]`, and the one at which it ended as
        `metadata["weight_version_end"]`."""
        self._sampling.weight_version = version

    def limit(self, num_batches: int) -> None:
        """Say how many more batches are needed, so that no prompts are begun beyond them."""
        self._pool.limit(num_batches)

    async def __aenter__(self) -> AsyncRolloutManager:
        _require_asyncio()
        self._is_aborted = False
        if self._misuse is None:
            self._pool.resume()
        if self.config.generate_while_training:
            await self._pool.__aenter__()
        self.is_entered = True
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.is_entered = False
        await self._pool.__aexit__(kind, error, trace)

    async def generate_batch(self, reward_fn: RewardFn | None = None) -> RolloutBatch:
        """The next batch; its groups are in the order of the data. `reward_fn` takes the place of
        `config.reward_fn` for samples that are rewarded from now on, until the next call.

        Raises RolloutAborted after `request_abort`; RequestsExhausted after the last batch, of
        buffers with an end; DataError, ConfigError or ConfigTypeError at once if a function returns
        something of the wrong form; RolloutError if groups are lost or refused one after another.
        After an error the next call goes on with what is whole.
        """
        _require_asyncio()
        check_reward_function(reward_fn)
        self._sampling.reward_fn = reward_fn or self.config.reward_fn
        try:
            batch = None if self._misuse is not None else await self._pool.next_batch()
        except RolloutAborted:
            if self._misuse is None:
                raise
            batch = None
        if batch is None:
            raise self._end_misuse()
        return self._convert(batch)

    def _end_misuse(self) -> BaseException:
        """The error of a function that returned something of the wrong form."""
        misuse, self._misuse = self._misuse, None
        assert misuse is not None
        if not self._is_aborted:
            self._pool.resume()
        return misuse

    def _convert(self, batch: GroupBatch) -> RolloutBatch:
        samples = [sample for group in batch for sample in _samples_of(group)]
        converted = convert_to_batch(samples, epoch_id=epoch_of(self.data_buffer), step_id=batch.number)
        converted.metadata |= {"lags": batch.lags, "rejected": batch.rejected, "lost": batch.lost, "retried": batch.retried}
        return converted

    def request_abort(self) -> None:
        """Cancel all calls, from any thread or a signal handler. `generate_batch`, now or when it
        is called next, raises RolloutAborted. Whole samples are kept; `resume` or the next `async
        with` goes on."""
        self._is_aborted = True
        self._pool.request_abort()

    def resume(self) -> None:
        """Go on after `request_abort`, with the next `generate_batch`."""
        self._is_aborted = False
        if self._misuse is None:
            self._pool.resume()

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values, at any moment: that of the buffer, the samples of complete
        groups, and what is known of the groups that are not. A token takes at most 13 bytes."""
        partial, ledger = split_state(self._pool.state_dict())
        return {
            "buffer_state": self.data_buffer.save_state(),
            "step_count": self.step_count,
            "partial_samples": partial,
            "ledger": ledger,
            "weight_version": self._sampling.weight_version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: complete groups are given as they are, the missing members of others
        are sampled with their seeds. Of a state without `ledger`, complete groups are kept and
        other samples dropped, with a warning.

        Raises ConfigError, and changes nothing, if the state is damaged or does not fit: other
        data, another number of samples in a group, or calls that run.
        """
        missing = [key for key in ("buffer_state", "step_count", "partial_samples") if key not in state]
        if missing:
            raise ConfigError(f"the state has no {' and no '.join(missing)}; load what state_dict() returned")
        version = state.get("weight_version", 0)
        check_number("step_count", state["step_count"])
        check_number("weight_version", version)
        pool_state = self._join(state)
        if pool_state.get("batch") != state["step_count"]:
            raise damaged(f"step_count is {state['step_count']}, and the ledger is that of batch {pool_state.get('batch')}")
        self._pool.read_state(pool_state)
        before = self.data_buffer.save_state()
        try:
            self._prompts.load(state["buffer_state"])
            self._pool.load_state_dict(pool_state)
        except BaseException:
            self._prompts.load(before)
            raise
        self._sampling.forget()
        self._sampling.weight_version = version

    def _join(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if "ledger" in state:
            return join_state(state["partial_samples"], state["ledger"], self.config.n_samples_per_prompt)
        samples = [Sample.from_dict(data) for data in state["partial_samples"]]
        return self._state_of(samples, step_count=state["step_count"])

    def _state_of(self, samples: Sequence[Sample], *, step_count: int) -> dict[str, Any]:
        return state_of_samples(
            samples,
            step_count=step_count,
            groups_per_batch=self.config.batch_size,
            samples_per_group=self.config.n_samples_per_prompt,
            members_per_group=self._members_per_group,
        )

    async def _play(self, ticket: Ticket) -> Member:
        try:
            return await self._sampling.play(ticket)
        except MisuseError as error:
            self._misuse = error.__cause__
            self._pool.request_abort()
            return await asyncio.get_running_loop().create_future()  # until the abort cancels this call

    def _accept(self, group: Group) -> bool:
        return is_accepted(_samples_of(group), self.config)

    def _explain(self, group: Group) -> str:
        assert self.config.filter_fn is not None
        rewards = ", ".join(f"{sample.reward:g}" for sample in _samples_of(group))
        return f"{name_of_filter(self.config.filter_fn)}, rewards {rewards}"


def _samples_of(group: Group) -> list[Sample]:
    return [sample for member in group.members for sample in members_samples(member)]


def _require_asyncio() -> None:
    """Raise RolloutError unless a loop of asyncio runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError as error:
        raise RolloutError(
            "AsyncRolloutManager needs a running event loop of asyncio, and does not run on trio; start it with asyncio.run(main())"
        ) from error


async def generate_rollout_batch(
    buffer: Any, config: RolloutConfig, reward_fn: RewardFn | None = None, **rollout_kwargs: Any
) -> RolloutBatch:
    """One batch, without a manager that outlives it: no more prompts are begun than it needs."""
    manager = AsyncRolloutManager(buffer, config, rollout_kwargs=rollout_kwargs)
    manager.limit(1)
    return await manager.generate_batch(reward_fn)
