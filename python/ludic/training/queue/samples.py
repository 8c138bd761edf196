"""Samples of one group as the bytes of a log's entry, and back: what `run_pipeline_actor` sends.

An actor that assigns credit itself sends samples, not rollouts. An entry is a whole group, so that
no group is ever divided. It has no number; its name is its producer and how many entries the
producer sent before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ludic.columns import Column, float_column, mask_column
from ludic.errors import DataError, DataTypeError
from ludic.list_fields import stored
from ludic.training.batching.fractions import read_fractions
from ludic.training.queue.columns import (
    bits_from_bytes,
    bits_to_bytes,
    floats_from_bytes,
    floats_to_bytes,
    ids_from_bytes,
    ids_to_bytes,
)
from ludic.training.queue.envelope import SAMPLES, EntryError, EntryLimits, check_meta, seal, unseal
from ludic.training.rollouts.check import SampleCheck, is_reward
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem
from ludic.types import group_of

DEFAULT_LIMITS = EntryLimits()
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


class _PlainSample(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ids: bytes  # [T] 32-bit integers
    attention: bytes | None  # [T] bits; None for 1 everywhere
    actions: bytes  # [T] bits
    weight: float
    meta: dict[str, Any]
    logps: bytes | None  # [A] floats


class _Sample(_PlainSample, array_like=True, forbid_unknown_fields=True):
    fractions: bytes | None = None  # [A] floats; without them it is sent as a `_PlainSample`


class _Samples(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    producer: str
    sequence: int
    samples: list[_Sample]


_DECODER = msgspec.msgpack.Decoder(_Samples)


def encode_samples(group: SampleGroup, limits: EntryLimits = DEFAULT_LIMITS) -> bytes:
    """The entry of a group. Raises EntryError for what `decode_samples` would refuse, so that an
    actor sends nothing that the trainer must set aside."""
    try:
        samples = [_encode_sample(item) for item in group.items]
    except (TypeError, ValueError, OverflowError) as error:
        raise EntryError(f"a sample cannot be sent: {error}") from error
    payload = seal(SAMPLES, _Samples(group.producer, group.sequence, samples), limits)
    decode_samples(payload, limits)
    return payload


def decode_samples(payload: bytes, limits: EntryLimits = DEFAULT_LIMITS, check: SampleCheck | None = None) -> SampleGroup:
    """The group of an entry. Raises EntryError, which says what is wrong, for anything that is not
    a group that can be trained on by whom `check` is."""
    content = unseal(payload, SAMPLES, _DECODER.decode, limits)
    if content.sequence < 0:
        raise EntryError(f"sequence ({content.sequence}) must be >= 0")
    if not 0 < len(content.samples) <= limits.max_rollouts:
        raise EntryError(f"the entry has {len(content.samples)} samples; it must have 1 to {limits.max_rollouts}")
    items = [_decode_sample(sample, check or SampleCheck()) for sample in content.samples]
    if len({group_of(item.meta) for item in items}) > 1:
        raise EntryError("the samples are of several groups (group_id)")
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


def _encode_sample(item: SAWItem) -> Any:
    ids, attention_mask, action_mask = (stored(item, name) for name in ("input_ids", "attention_mask", "action_mask"))
    if not len(ids) == len(attention_mask) == len(action_mask):
        raise ValueError(f"input_ids has {len(ids)} tokens, attention_mask {len(attention_mask)}, action_mask {len(action_mask)}")
    item.attachments.check_sendable()
    attention = bits_to_bytes(attention_mask, "attention_mask")
    logps = None if item.actor_logps is None else floats_to_bytes(stored(item.actor_logps, "token_logps"))
    fractions = item.attachments.action_fractions
    columns = (
        ids_to_bytes(ids),
        None if np.all(attention_mask) else attention,
        bits_to_bytes(action_mask, "action_mask"),
        float(item.weight),
        item.meta,
        logps,
    )
    return _PlainSample(*columns) if fractions is None else _Sample(*columns, floats_to_bytes(fractions))


def _decode_sample(sample: _Sample, check: SampleCheck) -> SAWItem:
    ids: Any = ids_from_bytes(sample.ids).view(Column)
    attention: Any = mask_column(0, len(ids))
    if sample.attention is not None:
        attention = bits_from_bytes(sample.attention, len(ids)).view(Column)
    actions: Any = bits_from_bytes(sample.actions, len(ids)).view(Column)
    num_actions = int(np.count_nonzero(actions))
    if not is_reward(sample.weight):
        raise EntryError(f"the weight of a sample is {sample.weight}; weights must be finite numbers of float32")
    check_meta(sample.meta, "a sample")
    for name in _NUMBERS:
        value = sample.meta.get(name)
        if value is not None and not is_reward(value):
            raise EntryError(f"{name} of a sample is {value!r}; it must be a finite number of float32")
    columns: Any = None if sample.logps is None else float_column(floats_from_bytes(sample.logps, num_actions))
    if fault := check.find_fault(sample.meta, ids, columns):
        raise EntryError(f"a sample has {fault}")
    try:
        logps = None if columns is None else ActorTokenLogps(columns)
        fractions = None if sample.fractions is None else floats_from_bytes(sample.fractions, num_actions).tolist()
        item = SAWItem(ids, attention, actions, sample.weight, sample.meta, SampleAttachments(logps, action_fractions=fractions))
        read_fractions([item])
    except (DataTypeError, DataError) as error:
        raise EntryError(str(error)) from error
    return item
