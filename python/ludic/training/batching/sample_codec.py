"""Samples as bytes: for the other ranks, for a queue, and for the batches ahead in a checkpoint.

The core's table has ids and masks, msgpack has the rest. 4,096 samples are a few columns, not 4,096
lists of Python numbers, and what is decoded are views of these columns.

    ids [5, 6], [7, 8, 9]  ->  offsets [0, 2, 5], input_ids [5, 6, 7, 8, 9]

All numbers come back exactly: weights in 64 bits, log-probabilities and fractions too unless 32
bits hold them. Sequences come back as arrays, which are lists when they are read.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ludic import _core
from ludic.columns import Column, float_column
from ludic.errors import DataError
from ludic.images.store import current_store
from ludic.training.batching.candidates import check_candidates, pack_candidates, unpack_candidates
from ludic.training.batching.routes import check_routes
from ludic.training.batching.token_columns import FRACTIONS, add_token_columns, has_columns
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem
from ludic.types import ImageSpan, Routes, read_spans, stored

VERSION, OLDEST = 5, 4
"""Of the form of a batch: as it is written, and the first that is read."""
_REFUSED = (TypeError, ValueError, OverflowError, RecursionError)
"""What msgspec raises for a value that it has no form for."""
_SEQUENCES = ("input_ids", "attention_mask", "action_mask")
_UNIT_KEYS = ("group_id", "pair_id", "rollout_id")
"""What samples are grouped by (`mini_batches.unit_key`); `group_id` is in their `request_meta`."""
_DTYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4"), "U8": np.dtype("u1")}


class _ActionColumn(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Numbers of the action tokens of N samples, of which some may have none."""

    has_numbers: bytes
    """[N] uint8: which samples have them."""
    dtype: Literal["<f4", "<f8"]
    """32 bits if that changes no number."""
    numbers: bytes
    """The numbers, one sample after another."""


class PackedSamples(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What the table of N samples lacks."""

    weights: bytes
    """[N] float64; the table has them as float32."""
    logps: _ActionColumn | None
    fractions: _ActionColumn | None
    meta: list[dict[Any, Any]]
    """N dictionaries."""
    columns: dict[str, _ActionColumn] = {}
    """Name -> a token column of the samples that have it."""
    candidates: list[list[bytes] | None] = []
    """`SampleAttachments.candidates` of each sample, int32; empty if none has any."""
    images: list[tuple[ImageSpan, ...]] = []
    """The spans of each sample; empty if none has any."""
    routes: list[Routes | None] = []
    """`SampleAttachments.routes` of each sample; empty if none has any."""


class _Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    samples: PackedSamples
    meta: dict[Any, Any]
    arrays: list[list[str | None]] | None
    """[N, 5] the dtype of each sequence that was an array of the user's; None if none was."""


def pack_samples(items: Sequence[SAWItem]) -> tuple[PackedSamples, bytes]:
    """The samples as two parts, of which the second, `SampleTable.to_bytes`, is large. Raises
    DataError and DataTypeError for samples that could not be trained on, as
    `SampleTable.from_items`."""
    bare: list[Any] = [(*(stored(item, name) for name in _SEQUENCES), item.weight) for item in items]
    table = _core.SampleTable.from_items([SAWItem(*sample) for sample in bare])
    for item in items:
        item.attachments.check_sendable()
    logps = [None if item.actor_logps is None else float_column(stored(item.actor_logps, "token_logps")) for item in items]
    columns: dict[str, Any] = {}
    candidates: list[list[bytes] | None] = []
    if has_columns(items):
        add_token_columns(table, items)  # refuses what cannot be trained on
        own = [{**item.attachments.token_columns, FRACTIONS: item.attachments.action_fractions} for item in items]
        for name in sorted({name for given in own for name in given}):
            columns[name] = _pack_column(name, [_as_floats(given.get(name)) for given in own], table.action_counts)
        candidates = [pack_candidates(item.attachments.candidates) for item in items] if check_candidates(items) else []
    images = [item.images for item in items] if any(item.images for item in items) else []
    packed = PackedSamples(
        weights=np.array([item.weight for item in items], dtype=np.float64).tobytes(),
        logps=_pack_column("actor_logps", logps, table.action_counts),
        fractions=columns.pop(FRACTIONS, None),
        meta=[item.meta for item in items],
        columns=columns,
        candidates=candidates,
        images=images,
        routes=[item.attachments.routes for item in items] if check_routes(items) else [],
    )
    return packed, table.to_bytes()


def unpack_samples(packed: PackedSamples, table: bytes | memoryview, *, is_foreign: bool = False) -> list[SAWItem]:
    """The samples of `pack_samples`. Their sequences share the memory of `table`: int32, and uint8
    for masks; read, they are lists. Raises DataError for anything else.

    `is_foreign`: the bytes come from a sender who is not trusted, and all of the table and of the
    token columns is checked.
    """
    try:
        checked = _core.SampleTable.from_bytes(table) if is_foreign else None
        own_columns = view_columns(table)
        offsets, ids, actions = own_columns["offsets"], own_columns["input_ids"], own_columns["action_mask"]
        attention = own_columns.get("attention_mask")
        if attention is None:
            attention = np.ones_like(actions)
        counts = np.add.reduceat(actions, offsets[:-1], dtype=np.int64)
        logps, fractions = (_unpack_column(column, counts) for column in (packed.logps, packed.fractions))
        attached = [
            SampleAttachments(None if own is None else ActorTokenLogps(own), None, None if parts is None else parts.tolist())
            for own, parts in zip(logps, fractions, strict=True)
        ]
        for name, column in packed.columns.items():
            for each, values in zip(attached, _unpack_column(column, counts), strict=True):
                if values is not None:
                    each.token_columns[name] = np.asarray(values)
        for each, among in zip(attached, packed.candidates, strict=True) if packed.candidates else ():
            each.candidates = unpack_candidates(among)
        for each, experts in zip(attached, packed.routes, strict=True) if packed.routes else ():
            each.routes = experts
        samples = zip(
            *(_split(column, offsets) for column in (ids, attention, actions)),
            np.frombuffer(packed.weights, np.float64).tolist(),
            packed.meta,
            attached,
            strict=True,
        )
        items = [SAWItem(*sample) for sample in samples]
        for item, spans in zip(items, packed.images, strict=True) if packed.images else ():
            item.images = read_spans(spans, len(stored(item, "input_ids")))
        check_routes(items)
        if checked is not None and has_columns(items):
            add_token_columns(checked, items)
            check_candidates(items)
        return items
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise DataError(f"the samples cannot be read: {error}") from error


def _as_floats(values: Any) -> NDArray[Any] | None:
    return None if values is None else float_column(np.asarray(values, dtype=np.float64))


def _pack_column(name: str, columns: Sequence[NDArray[Any] | None], counts: NDArray[np.int32]) -> _ActionColumn | None:
    """Example: [-0.5], None and [-1, -2] are the numbers -0.5, -1, -2 of the samples 1, 0, 1."""
    given = [each for each in columns if each is not None]
    if not given:
        return None
    for row, column in enumerate(columns):
        if column is not None and len(column) != counts[row]:
            raise DataError(f"sample {row} has {len(column)} {name} for {counts[row]} action tokens; there must be one each")
    has_numbers = np.array([each is not None for each in columns], dtype=np.uint8)
    numbers = np.concatenate(given)
    return _ActionColumn(has_numbers.tobytes(), "<f4" if numbers.dtype == np.float32 else "<f8", numbers.tobytes())


def _unpack_column(column: _ActionColumn | None, counts: NDArray[np.int64]) -> list[Any]:
    """[N] the numbers of each sample, or None."""
    if column is None:
        return [None] * len(counts)
    has_numbers = np.frombuffer(column.has_numbers, np.uint8) != 0
    numbers = np.frombuffer(column.numbers, column.dtype)
    bounds = np.concatenate([[0], (counts * has_numbers).cumsum()])
    if len(numbers) != bounds[-1]:
        raise DataError(f"there are {len(numbers)} numbers for {bounds[-1]} action tokens")
    return [part if there else None for part, there in zip(_split(numbers, bounds), has_numbers, strict=True)]


def _split(numbers: NDArray[Any], offsets: NDArray[np.int64]) -> list[Any]:
    """The parts of a column. Example: [5, 6, 7, 8, 9] with offsets [0, 2, 5] is [5, 6] and
    [7, 8, 9]."""
    column = numbers.view(Column)
    return [column[begin:end] for begin, end in itertools.pairwise(offsets.tolist())]


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


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no form in msgpack")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_DECODER = msgspec.msgpack.Decoder(_Batch)


def encode_batch(batch: SAWBatch, *, is_exact: bool = False) -> tuple[bytes, bytes]:
    """`batch` as two parts, of which the second is large, so that nothing copies it. Raises
    DataError and DataTypeError as `pack_samples`, and DataError, which names the key, for metadata
    that msgpack has no form for.

    Of metadata, a tuple comes back as a list, unless it names a group, a pair or a rollout; an
    array of numpy comes back as a list, a number of numpy as a number. With `is_exact` they are
    refused instead, as are subclasses of batch and sample, and arrays of the user's come back as
    arrays.
    """
    packed, table = pack_samples(batch.items)
    arrays = None
    if is_exact:
        if strange := {type(batch), *map(type, batch.items)} - {SAWBatch, SAWItem}:
            raise DataError(f"a {strange.pop().__name__} cannot be stored: its own fields would be lost")
        _check_plain(batch.meta, "meta of the batch")
        for item in batch.items:
            _check_plain(item.meta, "meta of a sample")
        arrays = [[_find_dtype(values) for values in _sequences_of(item)] for item in batch.items]
    try:
        return _ENCODER.encode(_Batch(VERSION, packed, batch.meta, arrays)), table
    except _REFUSED as error:
        aim = "stored" if is_exact else "sent to other ranks"
        raise DataError(f"{_find_refused(batch)} cannot be {aim} ({error}); use numbers, text, lists and dictionaries") from error


def decode_batch(head: bytes | memoryview, table: bytes | memoryview) -> SAWBatch:
    """The batch of `encode_batch`. Raises DataError for anything else."""
    try:
        content = _DECODER.decode(head)
    except (ValueError, TypeError) as error:  # MsgspecError is a ValueError
        raise DataError(f"the batch cannot be read: {error}; run one version of ludic everywhere") from error
    if not OLDEST <= content.version <= VERSION:
        raise DataError(f"the batch has version {content.version}, this ludic reads {VERSION}; run one version everywhere")
    items = unpack_samples(content.samples, table)
    current_store().check(span.digest for item in items for span in item.images)
    for item in items:
        _restore_tuples(item.meta)
    if content.arrays is not None:
        items = [_with_arrays(item, dtypes) for item, dtypes in zip(items, content.arrays, strict=True)]
    return SAWBatch(items, content.meta)


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


def _check_plain(value: Any, where: str) -> None:
    """Raise DataError unless `value` has only types that msgpack gives back."""
    if type(value) is dict and all(type(key) is str for key in value):
        for key, part in value.items():
            _check_plain(part, f"{where}: {key}")
    elif type(value) is list:
        for part in value:
            _check_plain(part, where)
    elif type(value) not in (type(None), bool, int, float, str):
        raise DataError(f"{where} is a {type(value).__name__}, which cannot be stored")


def _sequences_of(item: SAWItem) -> list[Any]:
    logps = None if item.actor_logps is None else stored(item.actor_logps, "token_logps")
    return [*(stored(item, name) for name in _SEQUENCES), logps, item.attachments.action_fractions]


def _find_dtype(values: Any) -> str | None:
    """The dtype of an array of the user's; None for what is a list when it is read."""
    if type(values) is np.ndarray:
        return values.dtype.str
    if values is not None and not isinstance(values, list | tuple | Column):
        raise DataError(f"a sequence is a {type(values).__name__}, which cannot be stored")
    return None


def _with_arrays(item: SAWItem, dtypes: Sequence[str | None]) -> SAWItem:
    """The sample with arrays of these types in place of columns."""
    given: list[Any] = [
        values if dtype is None else np.array(values, dtype=dtype)
        for values, dtype in zip(_sequences_of(item), dtypes, strict=True)
    ]
    ids, attention, actions, logps, fractions = given
    kept = None if logps is None else ActorTokenLogps(logps)
    attached = replace(item.attachments, actor_logps=kept, action_fractions=fractions)
    return SAWItem(ids, attention, actions, item.weight, item.meta, attached, item.images)


def _restore_tuples(meta: dict[Any, Any]) -> None:
    """Make the names of units tuples again where msgpack made lists of them, since a list cannot be
    hashed."""
    request = meta.get("request_meta")
    for names in (meta, request) if isinstance(request, dict) else (meta,):
        for key in _UNIT_KEYS:
            if isinstance(names.get(key), list):
                names[key] = _to_tuple(names[key])


def _to_tuple(value: Any) -> Any:
    """Example: [1, [2, 3]] becomes (1, (2, 3))."""
    return tuple(map(_to_tuple, value)) if isinstance(value, list) else value
