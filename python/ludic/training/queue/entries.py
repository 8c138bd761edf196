"""A played group as the bytes of a log's entry, and back.

What is decoded equals what was encoded: rollouts with their steps and token traces, the outcomes of
the episodes, and the failures. Every entry is checked as a protocol's rollouts are
(`rollouts.check`, `require_trace`), and its size before it is decoded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import msgspec

from ludic.errors import DataError
from ludic.training.queue.base import Lease
from ludic.training.queue.columns import floats_from_bytes, floats_to_bytes, ids_from_bytes, ids_to_bytes
from ludic.training.queue.envelope import GROUP, EntryError, EntryLimits, check_meta, seal, unseal
from ludic.training.rollouts.check import SampleCheck, check_rollouts, trace_columns
from ludic.training.rollouts.played import EpisodeFailure, PlayedRollouts, RolloutCounts
from ludic.training.rollouts.to_samples import require_trace
from ludic.types import Rollout, Step, TokenTrace, group_of

DEFAULT_LIMITS = EntryLimits()


@dataclass(frozen=True)
class Group:
    """A group as an actor delivers it."""

    run: str
    """Id of the run."""
    number: int
    """Number of the group."""
    version: int
    """The policy version that it was to be sampled with."""
    attempt: int = 0
    """How many times it was begun in vain before."""
    actor: str = ""
    """Who played it."""
    generation_s: float = 0.0
    """How long that took."""
    ended_s: float = 0.0
    """When it ended, in seconds since 1970 by the actor's clock."""
    played: PlayedRollouts = field(default_factory=lambda: PlayedRollouts([], RolloutCounts(), []))
    """Its rollouts, none if the group failed, and the outcomes of its episodes."""

    @classmethod
    def of_lease(cls, lease: Lease, rollouts: Sequence[Rollout], generation_s: float) -> Group:
        """What the holder of the lease has just played."""
        work, ended_s = lease.work, time.time()
        head = (lease.run, work.number, work.version, work.attempt, lease.actor)
        return cls(*head, generation_s, ended_s, as_played(rollouts))

    @property
    def policy_versions(self) -> tuple[int, int] | None:
        """The oldest and the newest version that sampled it; None where no rollout has one."""
        metas = [meta for rollout in self.played for meta in (rollout.meta, *(step.info for step in rollout.steps))]
        versions = [meta["policy_version"] for meta in metas if meta.get("policy_version") is not None]
        return (min(versions), max(versions)) if versions else None


def as_played(rollouts: Sequence[Rollout]) -> PlayedRollouts:
    """`rollouts` with the outcomes of their episodes; a plain list is one of successes."""
    if isinstance(rollouts, PlayedRollouts):
        return rollouts
    return PlayedRollouts(rollouts, RolloutCounts(num_episodes=len(rollouts)), [])


class _Trace(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    prompt: bytes
    completion: bytes
    logps: bytes | None
    finish_reason: str | None


class _Step(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    index: int
    prev_obs: str
    action: str
    next_obs: str | None
    reward: float
    truncated: bool
    terminated: bool
    info: dict[str, Any]
    trace: _Trace | None
    ts_ns: int


class _Rollout(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    id: str
    meta: dict[str, Any]
    steps: list[_Step]


class _Failure(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    episode_idx: int
    env_kind: str
    env_seed: int | None
    error: str
    attempts: int
    meta: dict[str, Any]
    seen: str | None = None  # these two are missing in entries of older versions
    answer: str | None = None


class _Group(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    run: str
    number: int
    version: int
    attempt: int
    actor: str
    generation_s: float
    ended_s: float
    rollouts: list[_Rollout]
    num_requested: int
    counts: list[int]
    failures: list[_Failure]


_DECODER = msgspec.msgpack.Decoder(_Group)


def encode_group(group: Group, limits: EntryLimits = DEFAULT_LIMITS) -> bytes:
    """The entry of a group. Raises EntryError for what `decode_group` would refuse, so that an
    actor delivers nothing that the trainer must set aside."""
    played = group.played
    _check_group(group, limits)
    try:
        rollouts = [_Rollout(each.id, each.meta, [_encode_step(step) for step in each.steps]) for each in played]
    except (TypeError, ValueError, OverflowError) as error:
        raise EntryError(f"a group holds tokens that cannot be sent: {error}") from error
    failures = [_Failure(**vars(each)) for each in played.failures]
    head = (group.run, group.number, group.version, group.attempt, group.actor, group.generation_s, group.ended_s)
    return seal(GROUP, _Group(*head, rollouts, played.num_requested, list(astuple(played.counts)), failures), limits)


def decode_group(payload: bytes, limits: EntryLimits = DEFAULT_LIMITS, check: SampleCheck | None = None) -> Group:
    """The group of an entry. Raises EntryError, which says what is wrong, for anything that is not
    a group that can be trained on by whom `check` is."""
    content = unseal(payload, GROUP, _DECODER.decode, limits)
    if len(content.counts) != len(astuple(RolloutCounts())):
        raise EntryError(f"the entry has {len(content.counts)} counts of episodes")
    _check_counts(len(content.rollouts), [len(rollout.steps) for rollout in content.rollouts], limits)
    try:
        rollouts = [Rollout(each.id, [_decode_step(step) for step in each.steps], each.meta) for each in content.rollouts]
    except EntryError:
        raise
    except (DataError, TypeError, ValueError) as error:
        raise EntryError(f"the entry holds no rollouts: {error}") from error
    failures = [EpisodeFailure(**msgspec.structs.asdict(each)) for each in content.failures]
    played = PlayedRollouts(rollouts, RolloutCounts(*content.counts), failures, num_requested=content.num_requested)
    head = (content.run, content.number, content.version, content.attempt, content.actor, content.generation_s, content.ended_s)
    group = Group(*head, played)
    _check_group(group, limits, check)
    return group


def _encode_step(step: Step) -> _Step:
    trace = step.trace
    columns = None
    if trace is not None:
        prompt, completion, logps = trace_columns(trace)
        columns = _Trace(
            ids_to_bytes(prompt), ids_to_bytes(completion), None if logps is None else floats_to_bytes(logps), trace.finish_reason
        )
    ends = (step.truncated, step.terminated)
    return _Step(step.index, step.prev_obs, step.action, step.next_obs, step.reward, *ends, step.info, columns, step.ts_ns)


def _decode_step(step: _Step) -> Step:
    trace = None
    if step.trace is not None:
        completion = ids_from_bytes(step.trace.completion)
        logps = None if step.trace.logps is None else floats_from_bytes(step.trace.logps, len(completion))
        trace = TokenTrace.from_arrays(ids_from_bytes(step.trace.prompt), completion, logps, step.trace.finish_reason)
    ends = (step.truncated, step.terminated)
    return Step(step.index, step.prev_obs, step.action, step.next_obs, step.reward, *ends, step.info, trace, step.ts_ns)


def _check_group(group: Group, limits: EntryLimits, check: SampleCheck | None = None) -> None:
    """Raise EntryError for a group that cannot be trained on."""
    check, played = check or SampleCheck(), group.played
    counts = {"number": group.number, "attempt": group.attempt, **vars(played.counts), "num_requested": played.num_requested}
    if wrong := [f"{name} ({count})" for name, count in counts.items() if count < 0]:
        raise EntryError(f"{', '.join(wrong)} must be >= 0")
    if fault := check.find_fault({"policy_version": group.version}):
        raise EntryError(f"the group has {fault}")
    _check_counts(len(played), [len(rollout.steps) for rollout in played], limits)
    try:
        for rollout in check_rollouts(played, check):
            check_meta(rollout.meta, "a rollout")
            for step in rollout.steps:
                require_trace(rollout, step)
    except EntryError:
        raise
    except (DataError, TypeError, AttributeError) as error:
        raise EntryError(f"the group cannot be trained on: {error}") from error
    if len({rollout.id for rollout in played}) < len(played):
        raise EntryError("two rollouts of the group have the same id; weights are assigned by id")
    ids = {str(group_of(rollout.meta)) for rollout in played}
    if limits.max_groups is not None and len(ids) > limits.max_groups:
        raise EntryError(f"the rollouts are of {len(ids)} groups (group_id); an entry has {limits.max_groups} at most")


def _check_counts(num_rollouts: int, num_steps: Sequence[int], limits: EntryLimits) -> None:
    if num_rollouts > limits.max_rollouts or max(num_steps, default=0) > limits.max_steps:
        raise EntryError(
            f"the group has {num_rollouts} rollouts of up to {max(num_steps, default=0)} steps; the limits are "
            f"{limits.max_rollouts} and {limits.max_steps}"
        )
