"""The entries of a log as bytes, and back: a header, columns, played groups, and groups of samples.

Decoding returns what was encoded: rollouts with their steps and token traces, the outcomes of
the episodes, and the failures. Every entry is checked as a protocol's rollouts are
(`rollouts.episodes`, `require_trace`), and its size before it is decoded.

All entries have a header with a checksum around msgpack. Numbers of tokens are in it as bytes.

    0       4        5     6              22
    | LUDQ | version | kind | xxh3-128 of the body | body ...

Bytes that were changed on their way are found by the checksum before anything is decoded.

Ids, log-probabilities and masks of T tokens are columns of numbers; no object is made for a token.
The bytes of an image are in an entry once, however many steps show it.

`run_pipeline_actor` sends the samples of one group. An actor that assigns credit itself sends
samples, not rollouts. An entry is a whole group, so that no group is ever divided. It has no
number; its name is its producer and how many entries the producer sent before.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from ludic.columns import Column, append_ids, float_column, int_column, join_ids
from ludic.errors import DataError, DataTypeError, check_value
from ludic.files.json_values import to_builtin
from ludic.images.content import find_digests
from ludic.images.store import ImageError, current_store, digest_of
from ludic.training.batching.candidates import pack_candidates, unpack_candidates
from ludic.training.batching.sample_codec import PackedSamples, pack_samples, unpack_samples
from ludic.training.queue.base import MAX_PAYLOAD_BYTES, Lease
from ludic.training.rollouts.episodes import (
    EpisodeFailure,
    PlayedRollouts,
    RolloutCounts,
    SampleCheck,
    check_rollouts,
    is_reward,
    trace_columns,
)
from ludic.training.rollouts.to_samples import require_trace
from ludic.training.types import SAWItem
from ludic.types import ImageSpan, Rollout, Routes, Step, TokenTrace, group_of, stored


@dataclass(frozen=True)
class EntryLimits:
    """What an entry may hold. Larger ones are refused before they are decoded, or before they are
    sent."""

    max_bytes: int = MAX_PAYLOAD_BYTES
    """Size of the entry, with its images."""
    max_rollouts: int = 4096
    """Rollouts of a group, or samples."""
    max_steps: int = 4096
    """Steps of a rollout."""
    max_groups: int | None = None
    """Groups (`group_id`) of the rollouts. None means any number."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_rollouts", "max_steps", "max_groups"):
            check_value(name, getattr(self, name), above=0, optional=True)


DEFAULT_LIMITS = EntryLimits()
TOKENS_PER_BYTE = 4
"""Tokens that the steps of an entry may read, for each byte that it may have: steps share them."""


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
    """How many attempts failed before."""
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
    candidates: list[bytes] | None = None
    shared: int = 0
    """If not 0, the number of all ids of the step before: the prompt begins with them, and `prompt`
    has those after."""
    images: tuple[ImageSpan, ...] = ()
    routes: Routes | None = None


class _Step(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    index: int
    prev_obs: str | list[dict[str, Any]]
    action: str
    next_obs: str | list[dict[str, Any]] | None
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
    images: dict[str, bytes] = {}
    """Digest -> bytes."""


_DECODER = msgspec.msgpack.Decoder(_Group)


def encode_group(group: Group, limits: EntryLimits = DEFAULT_LIMITS, *, with_images: bool = True) -> bytes:
    """The entry of a group. Raises EntryError for what `decode_group` would refuse, so that an
    actor delivers nothing that the trainer must set aside. `with_images`: it has the bytes of its
    images, for a reader with another store."""
    played = group.played
    _check_group(group, limits)
    try:
        rollouts = [_Rollout(each.id, each.meta, list(map(_encode_step, each.steps, [None, *each.steps]))) for each in played]
    except (TypeError, ValueError, OverflowError) as error:
        raise EntryError(f"a group holds tokens that cannot be sent: {error}") from error
    failures = [_Failure(**vars(each)) for each in played.failures]
    head = (group.run, group.number, group.version, group.attempt, group.actor, group.generation_s, group.ended_s)
    images = _read_images(_image_digests(played)) if with_images else {}
    return seal(GROUP, _Group(*head, rollouts, played.num_requested, list(astuple(played.counts)), failures, images), limits)


def decode_group(payload: bytes, limits: EntryLimits = DEFAULT_LIMITS, check: SampleCheck | None = None) -> Group:
    """The group of an entry. Raises EntryError, which says what is wrong, for anything that is not
    a group that can be trained on by whom `check` is."""
    content = unseal(payload, GROUP, _DECODER.decode, limits)
    if len(content.counts) != len(astuple(RolloutCounts())):
        raise EntryError(f"the entry has {len(content.counts)} counts of episodes")
    _check_counts(len(content.rollouts), [len(rollout.steps) for rollout in content.rollouts], limits)
    try:
        rollouts = [Rollout(each.id, [], each.meta) for each in content.rollouts]
        for rollout, each in zip(rollouts, content.rollouts, strict=True):
            for step in each.steps:
                rollout.steps.append(_decode_step(step, rollout.steps[-1] if rollout.steps else None))
    except EntryError:
        raise
    except (DataError, TypeError, ValueError) as error:
        raise EntryError(f"the entry holds no rollouts: {error}") from error
    failures = [EpisodeFailure(**msgspec.structs.asdict(each)) for each in content.failures]
    played = PlayedRollouts(rollouts, RolloutCounts(*content.counts), failures, num_requested=content.num_requested)
    head = (content.run, content.number, content.version, content.attempt, content.actor, content.generation_s, content.ended_s)
    group = Group(*head, played)
    _check_group(group, limits, check)
    _add_images(_image_digests(played), content.images)
    return group


def _image_digests(played: PlayedRollouts) -> list[str]:
    steps = [step for rollout in played for step in rollout.steps]
    read = (span.digest for step in steps if step.trace is not None for span in step.trace.images)
    shown = (digest for step in steps for obs in (step.prev_obs, step.next_obs) for digest in find_digests(obs))
    return list(dict.fromkeys((*read, *shown)))


def _read_images(digests: Iterable[str]) -> dict[str, bytes]:
    """The images of an entry. Raises EntryError for one that is not in the store."""
    try:
        return {digest: current_store().read(digest) for digest in digests}
    except ImageError as error:
        raise EntryError(str(error)) from error


def _add_images(needed: Iterable[str], images: Mapping[str, bytes]) -> None:
    """Store the needed images of an entry. Raises EntryError for one that is not the image of its
    digest, and for one that is neither in the entry nor in the store."""
    store = current_store()
    try:
        for digest in needed:
            name = f"image {digest!r:.80} of the entry"
            if digest in images and (found := digest_of(images[digest])) != digest:
                raise EntryError(f"{name} is damaged: its bytes have the digest {found}")
            if digest in images and (found := store.add(images[digest], name=name)) != digest:
                raise EntryError(f"{name} would be stored as {found}; run the same ludic everywhere")
            store.check([digest])
    except ImageError as error:
        raise EntryError(str(error)) from error


def _encode_step(step: Step, before: Step | None) -> _Step:
    """A step as it is sent. Of a prompt that begins with all ids of the step before, only the rest
    is: an episode takes the bytes of its distinct tokens."""
    trace = step.trace
    columns = None
    if trace is not None:
        prompt, completion, logps = trace_columns(trace)
        prompt, known = int_column(prompt), _ids_of(before)
        shared = len(known) if np.array_equal(prompt[: len(known)], known) else 0
        columns = _Trace(
            ids_to_bytes(prompt[shared:]),
            ids_to_bytes(completion),
            None if logps is None else floats_to_bytes(logps),
            trace.finish_reason,
            pack_candidates(trace.candidates),
            shared,
            trace.images,
            trace.routes,
        )
    ends = (step.truncated, step.terminated)
    return _Step(step.index, step.prev_obs, step.action, step.next_obs, step.reward, *ends, step.info, columns, step.ts_ns)


def _ids_of(step: Step | None) -> Column:
    return int_column([]) if step is None or step.trace is None else join_ids(*trace_columns(step.trace)[:2])


def _decode_step(step: _Step, before: Step | None) -> Step:
    trace = None
    if step.trace is not None:
        prompt, completion = ids_from_bytes(step.trace.prompt), ids_from_bytes(step.trace.completion)
        if shared := step.trace.shared:
            known = _ids_of(before)
            if shared != len(known):
                raise EntryError(f"a prompt shares {shared} tokens with the step before, which has {len(known)}")
            whole = append_ids(append_ids(known, prompt), completion)
            prompt, completion = whole[: shared + len(prompt)], whole[shared + len(prompt) :]
        logps = None if step.trace.logps is None else float_column(floats_from_bytes(step.trace.logps, len(completion)))
        candidates = unpack_candidates(step.trace.candidates)
        listed = None if candidates is None else [ids.tolist() for ids in candidates]
        facts = (step.trace.finish_reason, listed, step.trace.images, step.trace.routes)
        trace = TokenTrace(int_column(prompt), int_column(completion), logps, *facts)  # type: ignore[arg-type]
    ends = (step.truncated, step.terminated)
    return Step(step.index, step.prev_obs, step.action, step.next_obs, step.reward, *ends, step.info, trace, step.ts_ns)


def _check_group(group: Group, limits: EntryLimits, check: SampleCheck | None = None) -> None:
    check, played = check or SampleCheck(), group.played
    counts = {"number": group.number, "attempt": group.attempt, **vars(played.counts), "num_requested": played.num_requested}
    if wrong := [f"{name} ({count})" for name, count in counts.items() if count < 0]:
        raise EntryError(f"{', '.join(wrong)} must be >= 0")
    if fault := check.find_fault({"policy_version": group.version}):
        raise EntryError(f"the group has {fault}")
    _check_counts(len(played), [len(rollout.steps) for rollout in played], limits)
    traces = [step.trace for rollout in played for step in rollout.steps if step.trace is not None]
    num_tokens = sum(len(ids) for trace in traces for ids in trace_columns(trace)[:2])
    most = TOKENS_PER_BYTE * limits.max_bytes
    if num_tokens > most:
        raise EntryError(f"the steps of a group read {num_tokens} tokens, the limit is {most}; play smaller groups")
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
        most = f"{limits.max_rollouts} rollouts or {limits.max_steps} steps"
        raise EntryError(f"a group of {num_rollouts} rollouts of up to {max(num_steps, default=0)} steps exceeds {most}")


GROUP, SAMPLES = 1, 2
"""Kinds of entries."""
VERSIONS = {GROUP: 4, SAMPLES: 4}  # no flipped bit makes an older version of it
OLDEST = {GROUP: 1, SAMPLES: 2}
"""The first version that is read."""
_HEADER = struct.Struct(">4sBB16s")
_MAGIC = b"LUDQ"
T = TypeVar("T")


class EntryError(DataError):
    """An entry that cannot be trained on; it is set aside with this error's message."""


def seal(kind: int, content: msgspec.Struct, limits: EntryLimits) -> bytes:
    """The entry with this content. Raises EntryError if it is too large or holds what msgpack has
    no form for. Numbers and arrays of numpy and torch become numbers and lists."""
    try:
        body = _encode(content)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EntryError(f"a group holds a value that cannot be sent: {error}") from error
    if _HEADER.size + len(body) > limits.max_bytes:
        raise EntryError(
            f"a group of {len(body)} bytes is larger than the limit of {limits.max_bytes}; play smaller groups, or smaller images"
        )
    return _HEADER.pack(_MAGIC, VERSIONS[kind], kind, xxhash.xxh3_128_digest(body)) + body


def unseal(payload: bytes, kind: int, decoder: Callable[[memoryview], T], limits: EntryLimits) -> T:
    """The content of an entry. Raises EntryError for an entry of another kind or version, and for
    one that is damaged."""
    if len(payload) > limits.max_bytes:
        raise EntryError(f"the entry has {len(payload)} bytes, the limit is {limits.max_bytes}")
    if len(payload) < _HEADER.size:
        raise EntryError(f"the entry has {len(payload)} bytes, which is less than its header")
    magic, version, found, digest = _HEADER.unpack_from(payload)
    if magic != _MAGIC:
        raise EntryError("this is no entry of ludic")
    if found != kind:
        raise EntryError(f"the entry is of kind {found}, and {kind} is expected: do groups and samples share a queue?")
    if not OLDEST[kind] <= version <= VERSIONS[kind]:
        raise EntryError(f"the entry has version {version}, this ludic reads {VERSIONS[kind]}; run the same ludic everywhere")
    body = memoryview(payload)[_HEADER.size :]
    if xxhash.xxh3_128_digest(body) != digest:
        raise EntryError("the entry is damaged: its checksum differs")
    try:
        return decoder(body)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise EntryError(f"the entry has another structure: {error}") from error


def check_meta(meta: Mapping[str, Any], what: str) -> None:
    """Raise EntryError for metadata that the trainer computes with and that have another type."""
    if not all(isinstance(name, str) for name in meta):
        raise EntryError(f"the metadata of {what} has a key that is no text")
    for name in ("request_meta", "engine"):
        if not isinstance(meta.get(name) or {}, Mapping):
            raise EntryError(f"{name} of {what} is a {type(meta[name]).__name__}; it must be a mapping")
    for name, value in (("group_id", group_of(meta)), ("rollout_id", meta.get("rollout_id"))):
        if not isinstance(value, str | int | None):
            raise EntryError(f"{name} of {what} is a {type(value).__name__}; it must be text or a number")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=to_builtin)


def _encode(content: msgspec.Struct) -> bytes:
    """`content` as msgpack. Half of a surrogate pair in a text, which UTF-8 cannot write, becomes a
    question mark."""
    try:
        return _ENCODER.encode(content)
    except UnicodeEncodeError:
        return _ENCODER.encode(_without_surrogates(msgspec.to_builtins(content, builtin_types=(bytes,), enc_hook=to_builtin)))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(part) for key, part in value.items()}
    return [_without_surrogates(part) for part in value] if isinstance(value, list) else value


def ids_to_bytes(ids: Any) -> bytes:
    """Token ids as 32-bit integers, little-endian. Raises OverflowError for larger ones."""
    return np.asarray(ids, dtype="<i4").tobytes() if len(ids) else b""


def ids_from_bytes(column: bytes) -> NDArray[np.int32]:
    """The ids of `ids_to_bytes`, in their memory."""
    if len(column) % 4:
        raise EntryError(f"a column of token ids has {len(column)} bytes, which is no multiple of 4")
    return np.frombuffer(column, dtype="<i4")


def floats_to_bytes(values: Any) -> bytes:
    """Numbers as 32-bit floats if that loses nothing, as with what comes from a model in this
    process, else as 64-bit ones."""
    wide = np.asarray(values, dtype="<f8")
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype("<f4")
    return (narrow if np.array_equal(narrow, wide) else wide).tobytes()


def floats_from_bytes(column: bytes, length: int) -> NDArray[np.float64]:
    """The `length` numbers of `floats_to_bytes`, as 64-bit floats. Raises EntryError for another
    number of them."""
    if len(column) not in (4 * length, 8 * length):
        raise EntryError(f"a column of {len(column)} bytes cannot hold the log-probabilities of {length} tokens")
    return np.frombuffer(column, dtype="<f4" if len(column) == 4 * length else "<f8").astype(np.float64)


_NUMBERS = ("reward", "total_reward", "completion_length", "prompt_length")
"""Keys of a sample's meta that the trainer computes with."""


@dataclass(frozen=True)
class SampleGroup:
    """All samples of a group, with their credit.

    Example: the first entry of an actor is `SampleGroup("node1-77-5f3a", 0, items)`.
    """

    producer: str
    """Unique to one actor since it was started."""
    sequence: int
    """How many entries the producer sent before this one."""
    items: list[SAWItem]
    """At least one; all have the same group, or none has one."""


class _Samples(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    producer: str
    sequence: int
    samples: PackedSamples
    table: bytes
    images: dict[str, bytes] = {}
    """As of a group."""


_SAMPLES_DECODER = msgspec.msgpack.Decoder(_Samples)


def encode_samples(group: SampleGroup, limits: EntryLimits = DEFAULT_LIMITS) -> bytes:
    """The entry of a group. Raises EntryError for what `decode_samples` would refuse, so that an
    actor sends nothing that the trainer must set aside."""
    try:
        images = _read_images(span.digest for item in group.items for span in item.images)
        payload = seal(SAMPLES, _Samples(group.producer, group.sequence, *pack_samples(group.items), images), limits)
    except EntryError:
        raise
    except (DataError, DataTypeError) as error:
        raise EntryError(str(error)) from error
    decode_samples(payload, limits)
    return payload


def decode_samples(payload: bytes, limits: EntryLimits = DEFAULT_LIMITS, check: SampleCheck | None = None) -> SampleGroup:
    """The group of an entry. Raises EntryError, which says what is wrong, for anything that is not
    a group that can be trained on by whom `check` is."""
    content = unseal(payload, SAMPLES, _SAMPLES_DECODER.decode, limits)
    check_value("sequence", content.sequence, error=EntryError, least=0)
    if not 0 < len(content.samples.meta) <= limits.max_rollouts:
        raise EntryError(f"the entry has {len(content.samples.meta)} samples; it must have 1 to {limits.max_rollouts}")
    try:
        items = unpack_samples(content.samples, content.table, is_foreign=True)
    except DataError as error:
        raise EntryError(str(error)) from error
    for item in items:
        _check_sample(item, check or SampleCheck())
    if len({group_of(item.meta) for item in items}) > 1:
        raise EntryError("the samples are of several groups (group_id)")
    _add_images(dict.fromkeys(span.digest for item in items for span in item.images), content.images)
    return SampleGroup(content.producer, content.sequence, items)


def split_groups(items: Sequence[SAWItem]) -> list[list[SAWItem]]:
    """The samples of each group, in the order in which groups begin. Samples without a group belong
    together if they are of one rollout.

    Example: samples of groups a, b, a and of rollout r, which has no group, are [a, a], [b], [r].
    """
    groups: dict[tuple[str, Any], list[SAWItem]] = {}
    for index, item in enumerate(items):
        group = group_of(item.meta)
        rollout = item.meta.get("rollout_id", index)
        groups.setdefault(("rollout", rollout) if group is None else ("group", group), []).append(item)
    return list(groups.values())


def _check_sample(item: SAWItem, check: SampleCheck) -> None:
    if not is_reward(item.weight):
        raise EntryError(f"the weight of a sample is {item.weight}; weights must be finite numbers of float32")
    check_meta(item.meta, "a sample")
    for name in _NUMBERS:
        value = item.meta.get(name)
        if value is not None and not is_reward(value):
            raise EntryError(f"{name} of a sample is {value!r}; it must be a finite number of float32")
    logps = None if item.actor_logps is None else stored(item.actor_logps, "token_logps")
    fault = check.find_fault(item.meta, stored(item, "input_ids"), logps)
    if fault := fault or check.find_candidate_fault(item.attachments.candidates):
        raise EntryError(f"a sample has {fault}")
