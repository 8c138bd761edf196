"""Plays one member of a group: calls `generate_fn`, stamps and rewards what it returns."""

from __future__ import annotations

import asyncio
import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ludic.errors import ConfigError, ConfigTypeError, DataError, RolloutError
from ludic.event_loop import await_if_needed, run_in_daemon_thread
from ludic.rollouts.training.rollout_gen.buffered_prompts import copy_prompt
from ludic.rollouts.training.rollout_gen.generate_calls import (
    GenerateCalls,
    is_coroutine_function,
    name_of_function,
    to_reward,
)
from ludic.rollouts.training.rollout_gen.saved_groups import Member, members_samples
from ludic.rollouts.training.samples import check_sample, name_sample
from ludic.rollouts.training.types import RewardFn, RolloutConfig, Sample, SampleStatus
from ludic.training.rollouts.member_calls import MemberInterrupted, Ticket, seed_of_member


class MisuseError(Exception):
    """`generate_fn` or `reward_fn` is wrong, so that another attempt would be in vain; the cause
    says how."""


class Sampling:
    """Plays members. `reward_fn` and `weight_version` may be changed between calls.

    A member whose reward could not be computed is kept, so that the next attempt rewards it without
    sampling anew.
    """

    def __init__(self, config: RolloutConfig, rollout_kwargs: Mapping[str, Any], *, most_kept: int) -> None:
        """`most_kept`: how many samples without reward are kept at most."""
        self._config = config
        self._calls = GenerateCalls(config.generate_fn, rollout_kwargs)
        self._is_plain = not is_coroutine_function(config.generate_fn)
        self._most_kept = most_kept
        self._unrewarded: OrderedDict[tuple[int, int], list[Sample]] = OrderedDict()
        self.reward_fn: RewardFn | None = config.reward_fn
        self.weight_version = 0

    @property
    def runs_in_threads(self) -> bool:
        """Whether each call takes a thread: `generate_fn` is a plain function."""
        return self._is_plain

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
            self._keep(key, samples)
            raise
        for place, sample in enumerate(samples):
            _misuse(DataError, partial(check_sample, sample, place))
        return samples if self._config.group_calls else samples[0]

    def _keep(self, key: tuple[int, int], samples: list[Sample]) -> None:
        self._unrewarded[key] = samples
        while len(self._unrewarded) > self._most_kept:
            self._unrewarded.popitem(last=False)

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
        answer = await await_if_needed(await self._call_in_thread(call) if self._is_plain else call())
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
        sample.metadata = dict(sample.metadata)  # the function's own mapping may be that of a row, or of all samples
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
