"""`RollingBatchSource`: batches of the groups that are played first, while others are being played.

RolloutBatchSource     plays the groups of a batch, waits for the slowest, drops none
RollingBatchSource     keeps more groups in the air than a batch has, and replaces those that
                       its filter rejects (DAPO, arXiv:2503.14476, dynamic sampling)
"""

from __future__ import annotations

import asyncio
import base64
import copy
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from ludic.errors import ConfigError, LudicError, RolloutError, check_value
from ludic.event_loop import describe_error
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.source import BatchSourceBase
from ludic.training.queue.entries import Group as GroupEntry, decode_group, encode_group
from ludic.training.rollouts.engine import RolloutEngine, select_credit_assigner
from ludic.training.rollouts.episodes import PlayedRollouts, RolloutCounts, SampleCheck
from ludic.training.rollouts.group_filters import name_of_filter
from ludic.training.rollouts.group_ledger import MemberCodec, Prompts, check_number, damaged
from ludic.training.rollouts.group_pool import Group, GroupBatch, GroupPool, PoolCounts, Ticket
from ludic.training.rollouts.requests import RequestsByPosition, Stateful, make_group
from ludic.training.rollouts.to_samples import batch_from_played
from ludic.training.types import CreditAssigner, RequestsFn, SampleFilter, SAWBatch
from ludic.types import Rollout

SHOWN_REWARDS = 3
"""How many different rewards of a rejected group an error shows; of more it shows the mean."""


class RollingBatchSource(BatchSourceBase):
    """Plays groups with an engine, and returns batches of `groups_per_batch` whole groups.

    >>> source = RollingBatchSource(
    ...     engine=engine,
    ...     requests=requests,
    ...     algorithm=algorithm,
    ...     groups_per_batch=32,
    ...     group_size=8,
    ...     over_sampling_factor=1.5,
    ...     group_filter=of_rollouts(check_reward_nonzero_std),
    ... )
    >>> await Trainer(batch_source=source, ...).train(100)
    >>> await source.aclose()

    `requests`: a function that returns the next requests, one a prompt, and has `state_dict` and
    `load_state_dict`; or an object with `take` and `at` (`Prompts`). Seeds that a request
    leaves None, and the ids of groups, follow from `seed` and the number of the group.

    `group_filter` judges the rollouts of a group after their rewards and before credit; a group
    that it rejects is replaced by the next prompt. `sample_filter` judges single samples after
    credit, which are not replaced. `on_rollouts(batch number, rollouts)` is called with the
    rollouts of each batch.

    `concurrency` limits the episodes in flight. The engine plays a failed episode again; a group
    that fails in the end is lost, counted and replaced, unless no group can be played at all: then
    it is played again for up to `outage_patience_s`. `GroupPool` documents the other settings, and
    the order in which groups leave.

    **Weights.** With `max_lag` > 0 groups are played while the trainer computes, as in
    `OverlappedSource`: a client in this process needs its own copy of the weights, and samples are
    up to `max_lag` + `sync_every_steps` - 1 versions old.

    **Resuming.** The state holds the groups that are played and not returned, and which prompts
    were being played; those are played again with their seeds. With `max_lag=0`, or in order of
    submission, a resumed run trains the same prompts in the same order.
    """

    shards_across_ranks = False

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        requests: RequestsFn | Prompts,
        groups_per_batch: int,
        group_size: int,
        algorithm: RLAlgorithm | None = None,
        credit_assigner: CreditAssigner | None = None,
        over_sampling_factor: float = 1.0,
        max_lag: int | None = None,
        order: str = "arrival",
        group_filter: Callable[[Sequence[Rollout]], bool] | None = None,
        sample_filter: SampleFilter | None = None,
        max_steps: int = 1,
        timeout_s: float | None = None,
        concurrency: int = 8,
        patience: int = 10,
        outage_patience_s: float = 15.0,
        on_exhausted: str = "error",
        seed: int = 0,
        on_rollouts: Callable[[int, list[Rollout]], object] | None = None,
    ) -> None:
        for name, value in (("group_size", group_size), ("concurrency", concurrency)):
            check_value(name, value, least=1)
        self.engine = engine
        self.credit_assigner = select_credit_assigner(algorithm, credit_assigner)
        self._prompts = (
            requests
            if isinstance(requests, Prompts)
            else RequestsByPosition(requests, group_size, oldest_kept=lambda: self._pool.ledger.oldest_position())
        )
        self._group_size, self._seed, self._concurrency = group_size, seed, concurrency
        self._group_filter, self._sample_filter = group_filter, sample_filter
        self._max_steps, self._timeout_s, self._on_rollouts = max_steps, timeout_s, on_rollouts
        self._pool = GroupPool(
            play=self._play,
            accept=self._accept,
            explain=self._explain,
            prompts=self._prompts,
            groups_per_batch=groups_per_batch,
            members_per_group=1,  # the engine plays a group at a time, and its failed episodes again
            max_retries=0,
            over_sampling_factor=over_sampling_factor,
            max_lag=max_lag,
            order=order,
            patience=patience,
            outage_patience_s=outage_patience_s,
            on_exhausted=on_exhausted,
            seed=seed,
            codec=_PlayedCodec(),
        )
        self._gate = asyncio.Semaphore(concurrency)
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the gate."""
        self._is_entered = False
        self._failed: dict[int, RolloutCounts] = {}
        """Ordinal of a group -> the outcomes of its last call, which failed."""

    @property
    def max_lag(self) -> int:  # type: ignore[override]
        """How many batches after it was begun a group is returned at the latest."""
        return self._pool.max_lag

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        """Whether groups are played while the trainer computes."""
        return self.max_lag > 0

    @property
    def counts(self) -> PoolCounts:
        """The groups begun so far, by what became of them."""
        return self._pool.counts

    @property
    def num_batches(self) -> int:
        """How many batches have been returned."""
        return self._pool.num_batches

    async def next_batch(self) -> SAWBatch:
        """The next whole groups, in the order in which they were begun. Raises RequestsExhausted
        after the last one, and RolloutError if too many are lost or rejected."""
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._gate = asyncio.get_running_loop(), asyncio.Semaphore(self._concurrency)
        if self.overlaps and not self._is_entered:
            await self._pool.__aenter__()
            self._is_entered = True
        groups = await self._pool.next_batch()
        played = self._join(groups)
        if self._on_rollouts is not None:
            self._on_rollouts(groups.number, played)
        batch = batch_from_played(played, self.credit_assigner, self._sample_filter)
        batch.meta |= {
            "groups/rejected": groups.rejected,
            "groups/lost": groups.lost,
            "groups/kept": self._pool.counts.kept,
            "groups/lag_mean": fmean(groups.lags),
            "groups/lag_max": max(groups.lags),
        }
        return batch

    def use_check(self, check: SampleCheck) -> bool:
        self.engine.check = check
        return True

    def limit(self, num_batches: int) -> None:
        """Say how many more batches the run needs, so that no more are begun."""
        self._pool.limit(num_batches)

    def state_dict(self) -> dict[str, Any]:
        """The groups that are kept, the position of the requests, and the number of episodes."""
        state: dict[str, Any] = {"pool": self._pool.state_dict(), "engine": self.engine.state_dict()}
        if isinstance(self._prompts, RequestsByPosition):
            state["requests"] = self._prompts.state_dict(group["position"] for group in state["pool"]["groups"])
        elif isinstance(self._prompts, Stateful):
            state["requests"] = self._prompts.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ConfigError, and changes nothing, for a damaged state and
        for the state of another kind of source."""
        if not isinstance(state, Mapping) or "pool" not in state:
            raise ConfigError("the checkpoint is of a run without over-sampling and group filter; resume with its settings")
        engine, prompts = state.get("engine"), self._prompts
        wanted = {"pool", "engine", *(["requests"] if isinstance(prompts, RequestsByPosition | Stateful) else [])}
        if set(state) != wanted:
            raise damaged(f"it has the keys {', '.join(sorted(map(str, state)))}, and not {', '.join(sorted(wanted))}")
        if not isinstance(engine, Mapping) or set(engine) != {"episodes"}:
            raise damaged(f"engine ({engine!r}) must have the number of episodes")
        check_number("engine.episodes", engine["episodes"])
        put_back: Callable[[], None] | None = None
        if isinstance(prompts, RequestsByPosition):
            put_back = prompts.remember()
        elif isinstance(prompts, Stateful):
            put_back = partial(prompts.load_state_dict, copy.deepcopy(prompts.state_dict()))
        try:
            if isinstance(prompts, RequestsByPosition | Stateful):
                prompts.load_state_dict(state["requests"])
            self._pool.load_state_dict(state["pool"])
        except BaseException as error:
            if put_back is not None:
                put_back()
            if isinstance(error, LudicError) or not isinstance(error, Exception):
                raise
            requests = repr(state.get("requests"))[:200]
            raise damaged(f"requests cannot go on from {requests} ({describe_error(error)})") from error
        self.engine.load_state_dict(engine)

    async def aclose(self) -> None:
        """End all episodes. Groups that are played stay, the others go on with the next batch."""
        self._is_entered = False
        await self._pool.__aexit__(None, None, None)

    async def _play(self, ticket: Ticket) -> PlayedRollouts:
        requests = make_group(ticket.prompt, ticket.ordinal, self._group_size, self._seed)
        try:
            played = await self.engine.generate_rollouts(
                requests, self._max_steps, timeout_s=self._timeout_s, for_training=True, gate=self._gate
            )
        except RolloutError as error:
            if isinstance(error.played, PlayedRollouts):
                self._failed[ticket.ordinal] = error.played.counts
            raise
        self._failed.pop(ticket.ordinal, None)  # an outage is over
        return played

    def _accept(self, group: Group) -> bool:
        [played] = group.members
        return self._group_filter is None or bool(self._group_filter(list(played)))

    def _explain(self, group: Group) -> str:
        [played] = group.members
        rewards = Counter(round(rollout.total_reward, 3) for rollout in played)
        is_short = len(rewards) <= SHOWN_REWARDS
        shown = ", ".join(f"{number} of {reward:g}" for reward, number in sorted(rewards.items()))
        assert self._group_filter is not None
        mean = f"mean {fmean(rollout.total_reward for rollout in played):.1f}"
        return f"{name_of_filter(self._group_filter)} with rewards {shown if is_short else mean}"

    def _join(self, groups: GroupBatch) -> PlayedRollouts:
        members: list[PlayedRollouts] = [played for group in groups for played in group.members]
        counts = RolloutCounts()
        for ordinal in [ordinal for ordinal in self._failed if ordinal not in self._pool.ledger]:
            counts += self._failed.pop(ordinal)
        for played in members:
            counts += played.counts
        failures = [failure for played in members for failure in played.failures]
        return PlayedRollouts([rollout for played in members for rollout in played], counts, failures)


class _PlayedCodec(MemberCodec):
    """The rollouts of a group as text: the entry that actors send, compressed, in base64."""

    def encode(self, member: PlayedRollouts) -> str:
        entry = encode_group(GroupEntry("", 0, 0, played=member), with_images=False)  # the run has them
        return base64.b64encode(zlib.compress(entry, 1)).decode("ascii")

    def decode(self, value: str) -> PlayedRollouts:
        return decode_group(zlib.decompress(base64.b64decode(value, validate=True))).played
