"""Batches of samples, generated concurrently, with more prompts in the air than a batch needs."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from ludic.errors import ConfigError, ConfigTypeError, DataError, RolloutAborted as RolloutAborted, RolloutError
from ludic.event_loop import await_if_needed, run_in_daemon_thread
from ludic.rollouts.training.rollout_gen.rollout_generation import (
    BufferedPrompts,
    GenerateCalls,
    check_reward_function,
    convert_to_batch,
    copy_prompt,
    epoch_of,
    is_accepted,
    name_of_function,
    to_reward,
)
from ludic.rollouts.training.rollout_gen.saved_groups import (
    Member,
    SampleCodec,
    join_state,
    members_samples,
    split_state,
    state_of_samples,
)
from ludic.rollouts.training.samples import check_sample, name_sample
from ludic.rollouts.training.types import RewardFn, RolloutBatch, RolloutConfig, Sample, SampleStatus
from ludic.training.reward_functions import is_coroutine_function
from ludic.training.rollouts.group_filters import name_of_filter
from ludic.training.rollouts.group_ledger import Group, PoolCounts, check_number, damaged
from ludic.training.rollouts.group_pool import GroupPool, Ticket
from ludic.training.rollouts.member_calls import MemberInterrupted, seed_of_member

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
    off. Outside, `generate_batch` ends the calls that it started. Complete samples are kept either
    way. A thread cannot be stopped: if its call is cancelled it is let go, and runs on; without
    `generate_while_training`, `generate_batch` waits until it ends, for up to 30 s, and keeps what
    it returned.

    `GroupPool` has the rules of admission, selection, retries and abort. The manager runs on
    asyncio.

    `data_buffer`: a `DataBuffer`, or an object with `get_prompts(n)`, `save_state()` and
    `load_state(state)`. One with `position` and `at(position)` too has the prompts of unfinished
    groups found again by their positions; of another they are in the state, and must be JSON
    values: `state_dict` raises DataError for a prompt that is not.

    `partial_samples`: whole samples to begin with, such as from a state.
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
        concurrency = config.max_concurrency or (MOST_THREADS if self._sampling.runs_in_threads else None)
        self._pool = GroupPool(
            play=self._play,
            accept=self._accept,
            prompts=self._prompts,
            groups_per_batch=config.batch_size,
            members_per_group=1 if config.group_calls else config.n_samples_per_prompt,
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
            self._pool.load_state_dict(state_of_samples(partial_samples, config, step_count=0))
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
        buffers with an end; DataError, ConfigError or ConfigTypeError immediately if a function
        returns something of the wrong form; RolloutError if groups are lost or refused one after
        another. After an error the next call goes on with the complete samples.
        """
        _require_asyncio()
        check_reward_function(reward_fn)
        self._sampling.reward_fn = reward_fn or self.config.reward_fn
        try:
            groups = None if self._misuse is not None else await self._pool.next_batch()
        except RolloutAborted:
            if self._misuse is None:
                raise
            groups = None
        if groups is None:  # a function returned something of the wrong form
            misuse, self._misuse = self._misuse, None
            assert misuse is not None
            if not self._is_aborted:
                self._pool.resume()
            raise misuse
        samples = [sample for group in groups for sample in _samples_of(group)]
        batch = convert_to_batch(samples, epoch_id=epoch_of(self.data_buffer), step_id=groups.number)
        batch.metadata |= {"lags": groups.lags, "rejected": groups.rejected, "lost": groups.lost, "retried": groups.retried}
        return batch

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
        """The state as JSON values, at any moment: the state of the buffer, the samples of complete
        groups, and the records of incomplete groups. A token takes at most 13 bytes."""
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
        if "ledger" in state:
            pool_state = join_state(state["partial_samples"], state["ledger"], self.config.n_samples_per_prompt)
        else:
            samples = [Sample.from_dict(data) for data in state["partial_samples"]]
            pool_state = state_of_samples(samples, self.config, step_count=state["step_count"])
        if pool_state.get("batch") != state["step_count"]:
            raise damaged(f"step_count is {state['step_count']}, and the ledger belongs to batch {pool_state.get('batch')}")
        before = self.data_buffer.save_state()
        try:
            self._prompts.load(state["buffer_state"])
            self._pool.load_state_dict(pool_state)
        except BaseException:
            self._prompts.load(before)
            raise
        self._sampling.forget()
        self._sampling.weight_version = version

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
        raise RolloutError("AsyncRolloutManager needs a running loop of asyncio; start it with asyncio.run(main())") from error


async def generate_rollout_batch(
    buffer: Any, config: RolloutConfig, reward_fn: RewardFn | None = None, **rollout_kwargs: Any
) -> RolloutBatch:
    """One batch, without a manager that outlives it: no more prompts are begun than it needs."""
    manager = AsyncRolloutManager(buffer, config, rollout_kwargs=rollout_kwargs)
    manager.limit(1)
    return await manager.generate_batch(reward_fn)


class MisuseError(Exception):
    """`generate_fn` or `reward_fn` is wrong, so that another attempt cannot succeed; the cause says
    how."""


class Sampling:
    """Plays members. `reward_fn` and `weight_version` may be changed between calls.

    A member whose reward could not be computed is kept, so that the next attempt rewards it without
    sampling anew.
    """

    def __init__(self, config: RolloutConfig, rollout_kwargs: Mapping[str, Any], *, most_kept: int) -> None:
        """`most_kept`: how many samples without reward are kept at most."""
        self._config = config
        self._calls = GenerateCalls(config.generate_fn, rollout_kwargs)
        self.runs_in_threads = not is_coroutine_function(config.generate_fn)
        """Whether each call takes a thread: `generate_fn` is a plain function."""
        self._most_kept = most_kept
        self._unrewarded: OrderedDict[tuple[int, int], list[Sample]] = OrderedDict()
        self.reward_fn: RewardFn | None = config.reward_fn
        self.weight_version = 0

    async def play(self, ticket: Ticket) -> Member:
        """Sample and reward one member. Raises MisuseError for an answer of the wrong form,
        MemberInterrupted for one that was aborted and can be continued."""
        key = (ticket.ordinal, ticket.member)
        samples = self._unrewarded.pop(key, None)
        if samples is None:
            samples = await self._sample(ticket)
        try:
            await self._reward(samples)
        except BaseException:
            self._unrewarded[key] = samples
            while len(self._unrewarded) > self._most_kept:
                self._unrewarded.popitem(last=False)
            raise
        for place, sample in enumerate(samples):
            _misuse(DataError, partial(check_sample, sample, place))
        return samples if self._config.group_calls else samples[0]

    def forget(self) -> None:
        """Forget the members without reward, because the pool begins from another state."""
        self._unrewarded.clear()

    async def _sample(self, ticket: Ticket) -> list[Sample]:
        members = range(self._config.n_samples_per_prompt) if self._config.group_calls else [ticket.member]
        prompts = [copy_prompt(ticket.prompt) for _ in members]
        seeds = [seed_of_member(self._config.seed, ticket.ordinal, member) for member in members]
        version = self.weight_version
        begun = copy.deepcopy(ticket.partial)  # what a call that fails has written into it is not used
        before = None if begun is None else members_samples(begun)
        for sample in before or ():
            sample.status = SampleStatus.PENDING
        call = partial(self._calls, prompts, seeds=seeds, partial=begun, weight_version=version)
        answer = await await_if_needed(await self._call_in_thread(call) if self.runs_in_threads else call())
        samples = _misuse(DataError, lambda: self._calls.check(answer, prompts))
        for place, (sample, member) in enumerate(zip(samples, members, strict=True)):
            first = version if before is None else before[place].metadata["weight_version"]
            self._stamp(sample, ticket.ordinal, member, first)
        if any(sample.status is SampleStatus.ABORTED for sample in samples):
            if self._calls.takes_partial:
                has_grown = _size_of(samples) > (0 if ticket.partial is None else _size_of(members_samples(ticket.partial)))
                raise MemberInterrupted(samples if self._config.group_calls else samples[0], has_grown=has_grown)
            raise RolloutError(f"{self._calls.name} returned an aborted sample; it is sampled again")
        return samples

    async def _call_in_thread(self, call: Callable[[], Any]) -> Any:
        """What a plain function returns. If this is cancelled, its thread is let go; without
        `generate_while_training` it is waited for and its answer used, because it cannot be
        stopped and must not sample while the trainer computes."""
        answer = run_in_daemon_thread(call, name="ludic-generate")
        if self._config.generate_while_training:
            return await answer
        running = asyncio.ensure_future(answer)
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        return running.result()

    def _stamp(self, sample: Sample, ordinal: int, member: int, first_version: int) -> None:
        """Write down what the manager knows of a sample. Versions that the function has noted
        itself stay: it may know from the server's answers."""
        sample.group_index, sample.index = ordinal, ordinal * self._config.n_samples_per_prompt + member
        sample.metadata = dict(sample.metadata)  # the function's mapping may belong to a row, or to all samples
        sample.metadata.setdefault("weight_version", first_version)
        if sample.status is SampleStatus.ABORTED:
            return
        sample.metadata.setdefault("weight_version_end", self.weight_version)
        if sample.status is SampleStatus.PENDING:  # the default: the function does not say how it ended
            sample.status = SampleStatus.COMPLETED

    async def _reward(self, samples: Sequence[Sample]) -> None:
        """Reward the samples. Raises the first error after all have ended."""
        function = self.reward_fn
        if function is None:
            return
        rewards = await asyncio.gather(*(_reward_one(function, sample) for sample in samples), return_exceptions=True)
        for sample, reward in zip(samples, rewards, strict=True):
            if isinstance(reward, BaseException):
                raise reward
            sample.reward = reward


async def _reward_one(function: RewardFn, sample: Sample) -> float:
    name = name_of_function(function)
    value = await await_if_needed(function(sample))
    reward = _misuse(ConfigError, lambda: to_reward(value, name))
    if not math.isfinite(reward):
        raise DataError(f"{name} gave {name_sample(sample, 0)} the reward {reward}; rewards must be finite")
    return reward


def _size_of(samples: Sequence[Sample]) -> int:
    """How much is sampled, in tokens, or in characters by a function that gives only text."""
    return sum(len(sample.tokens) or len(sample.response) for sample in samples)


def _misuse(kind: type[Exception], check: Callable[[], Any]) -> Any:
    """What `check` returns; its error as the cause of a MisuseError."""
    try:
        return check()
    except (kind, ConfigTypeError) as error:
        raise MisuseError from error
