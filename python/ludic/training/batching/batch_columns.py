"""A batch as bytes, for the other ranks: the core's table for the numbers of tokens, msgpack for
the rest. 4,096 samples are a few columns, not 4,096 lists of Python numbers, and what arrives are
views of these columns.

    ids [5, 6], [7, 8, 9]  ->  offsets [0, 2, 5], input_ids [5, 6, 7, 8, 9]

Numbers travel as the core stores them: ids as int32, log-probabilities as float32. Of metadata, a
tuple arrives as a list, an array of numpy as a list, a number of numpy as a number. A tuple that
names a group, a pair or a rollout stays a tuple, since samples are grouped by it.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ludic import _core
from ludic.columns import Column
from ludic.errors import DataError
from ludic.training.batching.fractions import read_fractions
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem

VERSION = 3
_UNIT_KEYS = ("group_id", "pair_id", "rollout_id")
"""What samples are grouped by (`mini_batches.unit_key`); `group_id` is in their `request_meta`."""
_REFUSED = (TypeError, ValueError, OverflowError, RecursionError)
"""What msgspec raises for a value that it has no form for."""


class _Head(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What the table of N samples lacks."""

    version: int
    weights: bytes
    """[N] float64; the table has them as float32."""
    action_counts: bytes
    """[N] int32, so that nobody has to count them again."""
    fractions: bytes
    """float64 `action_fractions` of all samples that have them, one after another."""
    has_fractions: bytes
    """[N] uint8: which samples have them. Empty if none has."""
    item_meta: list[dict[Any, Any]]
    """N dictionaries."""
    meta: dict[Any, Any]


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no form in msgpack")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_DECODER = msgspec.msgpack.Decoder(_Head)


def encode_columns(batch: SAWBatch) -> tuple[bytes, bytes]:
    """`batch` as two parts, of which the second is large, so that nothing copies it: the head, and
    `SampleTable.to_bytes`. Raises DataError and DataTypeError for samples that could not be trained
    on, as `SampleTable.from_items`, and DataError, which names the key, for metadata that msgpack
    has no form for."""
    table = _core.SampleTable.from_items(batch.items)
    for item in batch.items:
        item.attachments.check_sendable()
    head = _Head(
        version=VERSION,
        weights=np.array([item.weight for item in batch.items], dtype=np.float64).tobytes(),
        action_counts=table.action_counts.tobytes(),
        **_encode_fractions(batch.items),
        item_meta=[item.meta for item in batch.items],
        meta=batch.meta,
    )
    try:
        return _ENCODER.encode(head), table.to_bytes()
    except _REFUSED as error:
        where = _find_refused(batch)
        raise DataError(
            f"{where} cannot be sent to other ranks ({error}); make it of numbers, text, lists and dictionaries"
        ) from error


def _find_refused(batch: SAWBatch) -> str:
    """The first entry of the metadata that cannot be encoded, for a message."""
    places = [("the batch", batch.meta), *((f"sample {row}", item.meta) for row, item in enumerate(batch.items))]
    for name, meta in places:
        for key, value in meta.items():
            try:
                _ENCODER.encode({key: value})
            except _REFUSED:
                return f"{key!r} in the meta of {name}"
    return "the batch"


def decode_columns(head: bytes | memoryview, table: bytes | memoryview) -> SAWBatch:
    """The batch of `encode_columns`. Its samples hold arrays that share the memory of `table`:
    int32, and uint8 for masks; read, they are lists. Raises DataError for anything else."""
    try:
        message = _DECODER.decode(head)
        columns = view_columns(table)
    except (ValueError, KeyError, TypeError, struct.error) as error:  # MsgspecError is a ValueError
        raise DataError(f"the batch that rank 0 sent cannot be read: {error}; run one version of ludic on all ranks") from error
    if message.version != VERSION:
        raise DataError(
            f"rank 0 sent a batch of version {message.version}, this ludic reads {VERSION}; run one version on all ranks"
        )
    offsets, ids, actions = columns["offsets"], columns["input_ids"], columns["action_mask"]
    attention = columns.get("attention_mask")
    if attention is None:
        attention = np.ones_like(actions)
    counts = np.frombuffer(message.action_counts, np.int32)
    attachments = _attachments(columns.get("actor_logps"), actions, counts)
    if message.has_fractions:
        attachments = list(map(_with_fractions, attachments, _decode_fractions(message, counts)))
    parts = zip(
        *(_split(column.view(Column), offsets) for column in (ids, attention, actions)),
        np.frombuffer(message.weights, np.float64).tolist(),
        map(_restore_tuples, message.item_meta),
        attachments,
        strict=True,
    )
    return SAWBatch([SAWItem(*part) for part in parts], message.meta)


_DTYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4"), "U8": np.dtype("u1")}


def view_columns(table: bytes | memoryview) -> dict[str, NDArray[Any]]:
    """The columns of `SampleTable.to_bytes`, in its memory; the readers of safetensors copy them.

    The layout: 8 bytes with the size of the header, then the header, then the columns, which the
    header gives as `{"offsets": {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]}}`.
    """
    (size,) = struct.unpack_from("<Q", table)
    fields = json.loads(bytes(table[8 : 8 + size]))
    fields.pop("__metadata__", None)
    begin = 8 + size
    return {
        name: np.frombuffer(table, _DTYPES[field["dtype"]], count=field["shape"][0], offset=begin + field["data_offsets"][0])
        for name, field in fields.items()
    }


def _restore_tuples(meta: dict[Any, Any]) -> dict[Any, Any]:
    """Make the names of units tuples again where msgpack made lists of them, since a list cannot be
    hashed. Changes `meta`, and returns it."""
    request = meta.get("request_meta")
    for names in (meta, request) if isinstance(request, dict) else (meta,):
        for key in _UNIT_KEYS:
            if isinstance(names.get(key), list):
                names[key] = _to_tuple(names[key])
    return meta


def _to_tuple(value: Any) -> Any:
    """Example: [1, [2, 3]] becomes (1, (2, 3))."""
    return tuple(map(_to_tuple, value)) if isinstance(value, list) else value


def _split(column: NDArray[Any], offsets: NDArray[np.int64]) -> list[Any]:
    """The parts of a column. Example: [5, 6, 7, 8, 9] with offsets [0, 2, 5] is [5, 6] and
    [7, 8, 9]."""
    bounds = offsets.tolist()
    return [column[begin:end] for begin, end in itertools.pairwise(bounds)]


def _attachments(
    logps: NDArray[np.float32] | None, actions: NDArray[np.uint8], action_counts: NDArray[np.int32]
) -> list[SampleAttachments]:
    """The log-probabilities of each sample's action tokens, from those of all tokens.

    Example: [0, a, 0, b, c] with actions [0, 1, 0, 1, 1] is [a, b, c]. Two samples with 1 and 2
    actions divide it at 0, 1 and 3: [a] and [b, c].
    """
    if logps is None:
        return [SampleAttachments() for _ in action_counts]
    bounds = np.concatenate([[0], action_counts.cumsum()])
    parts = _split(logps[actions.view(np.bool_)].view(Column), bounds)
    return [SampleAttachments(ActorTokenLogps(part)) for part in parts]


def _encode_fractions(items: Sequence[SAWItem]) -> dict[str, bytes]:
    """`_Head.fractions` and `_Head.has_fractions`. Example: fractions None and [0.5, 1] are
    0.5 1 and 0 1."""
    given = [item.attachments.action_fractions for item in items]
    if all(each is None for each in given):
        return {"fractions": b"", "has_fractions": b""}
    read_fractions(items)
    has = np.array([each is not None for each in given], dtype=np.uint8)
    parts = [np.asarray(each, dtype=np.float64) for each in given if each is not None]
    return {"fractions": np.concatenate(parts).tobytes(), "has_fractions": has.tobytes()}


def _decode_fractions(message: _Head, action_counts: NDArray[np.int32]) -> list[Any]:
    """[N] the fractions of each sample, or None."""
    has = np.frombuffer(message.has_fractions, np.uint8)
    bounds = np.concatenate([[0], (action_counts * has).cumsum()])
    parts = _split(np.frombuffer(message.fractions, np.float64), bounds)
    return [part if there else None for part, there in zip(parts, has, strict=True)]


def _with_fractions(attachments: SampleAttachments, fractions: Any) -> SampleAttachments:
    return SampleAttachments(attachments.actor_logps, action_fractions=fractions)
