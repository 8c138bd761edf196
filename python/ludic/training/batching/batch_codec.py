"""Batches as bytes, for a checkpoint: what is decoded equals what was encoded, types included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from ludic.columns import Column
from ludic.errors import CheckpointError, DataError
from ludic.list_fields import stored
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem

VERSION = 1
_PLAIN = (type(None), bool, int, float, str)


class _Array(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A one-dimensional numpy array."""

    dtype: str
    data: bytes
    is_column: bool = False
    """Whether it is a `Column`, a list for whoever reads it."""


_Sequence = list[int] | _Array
_Floats = list[float | int] | _Array


class _PlainSample(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    input_ids: _Sequence
    attention_mask: _Sequence
    action_mask: _Sequence
    weight: float
    meta: dict[str, Any]
    actor_logps: _Floats | None


class _Sample(_PlainSample, array_like=True, forbid_unknown_fields=True):
    action_fractions: _Floats | None = None
    """A sample without them is written as a `_PlainSample`, which earlier versions read."""


class _Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    samples: list[_Sample]
    meta: dict[str, Any]


class _Batches(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    batches: list[_Batch]


_DECODER = msgspec.msgpack.Decoder(_Batches)


def encode_batches(batches: Iterable[SAWBatch]) -> bytes:
    """`batches` as msgpack. Raises DataError for what would come back changed: metadata that is not
    made of numbers, text, lists and dictionaries (the message names the key), sequences that are
    not of integers, and subclasses of batch or sample."""
    content = _Batches(VERSION, [_encode_batch(batch) for batch in batches])
    try:
        data = msgspec.msgpack.encode(content)
        _DECODER.decode(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # MsgspecError is a ValueError
        raise DataError(f"a batch holds a value that cannot be stored: {error}") from error
    return data


def decode_batches(data: bytes) -> list[SAWBatch]:
    """The batches of `encode_batches`. Raises CheckpointError for anything else."""
    try:
        content = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"the stored batches are damaged: {error}") from error
    if content.version != VERSION:
        raise CheckpointError(f"the stored batches have version {content.version}, this ludic reads {VERSION}")
    try:
        return [SAWBatch([_decode_sample(sample) for sample in batch.samples], batch.meta) for batch in content.batches]
    except (TypeError, ValueError) as error:  # an array of another dtype, or of half a number
        raise CheckpointError(f"the stored batches are damaged: {error}") from error


def _encode_batch(batch: SAWBatch) -> _Batch:
    for part in (batch, *batch.items):
        if type(part) not in (SAWBatch, SAWItem):
            raise DataError(f"a {type(part).__name__} cannot be stored: its own fields would be lost")
    _check_plain(batch.meta, "meta of the batch")
    return _Batch([_encode_sample(item) for item in batch.items], batch.meta)


def _encode_sample(item: SAWItem) -> Any:
    _check_plain(item.meta, "meta of a sample")
    item.attachments.check_sendable()
    logps, fractions = item.attachments.actor_logps, item.attachments.action_fractions
    columns = (
        _encode_sequence(stored(item, "input_ids")),
        _encode_sequence(stored(item, "attention_mask")),
        _encode_sequence(stored(item, "action_mask")),
        item.weight,
        item.meta,
        None if logps is None else _encode_sequence(stored(logps, "token_logps")),
    )
    return _PlainSample(*columns) if fractions is None else _Sample(*columns, _encode_sequence(fractions))


def _decode_sample(sample: _Sample) -> SAWItem:
    fractions = None if sample.action_fractions is None else _decode_sequence(sample.action_fractions)
    logps = None if sample.actor_logps is None else ActorTokenLogps(_decode_sequence(sample.actor_logps))
    return SAWItem(
        _decode_sequence(sample.input_ids),
        _decode_sequence(sample.attention_mask),
        _decode_sequence(sample.action_mask),
        sample.weight,
        sample.meta,
        SampleAttachments(logps, action_fractions=fractions),
    )


def _encode_sequence(values: Any) -> Any:
    if not isinstance(values, np.ndarray):
        return values
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        raise DataError(f"an array of shape {values.shape} and dtype {values.dtype} cannot be stored as a sequence of numbers")
    return _Array(values.dtype.str, values.tobytes(), isinstance(values, Column))


def _decode_sequence(values: Any) -> Any:
    if not isinstance(values, _Array):
        return values
    array = np.frombuffer(values.data, dtype=np.dtype(values.dtype)).copy()
    return array.view(Column) if values.is_column else array


def _check_plain(value: Any, where: str) -> None:
    """Raise DataError unless `value` has only types that msgpack gives back."""
    if type(value) in _PLAIN:
        return
    if type(value) is dict and all(type(key) is str for key in value):
        for key, part in value.items():
            _check_plain(part, f"{where}: {key}")
    elif type(value) is list:
        for part in value:
            _check_plain(part, where)
    else:
        raise DataError(f"{where} is a {type(value).__name__}, which cannot be stored")
