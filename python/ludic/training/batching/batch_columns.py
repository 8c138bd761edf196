"""A batch as columns of bytes, for the other ranks. 4,096 samples are one message of a few parts,
not 4,096 lists of Python numbers: what arrives are views of the message, and no number is copied.

    ids [5, 6], [7, 8, 9]  ->  lengths [2, 3], ids [5, 6, 7, 8, 9]

Numbers travel as the core stores them: ids as int32, log-probabilities as float32. Metadata travel
as msgpack: a tuple arrives as a list, an array of numpy as a list, a number of numpy as a number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ludic.errors import DataError
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem

VERSION = 1
_WITHOUT = -1
"""Number of log-probabilities of a sample that has none."""


class _Columns(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """N samples of S tokens and A log-probabilities in all."""

    version: int
    lengths: bytes
    """[N] int32: tokens of each sample, of its attention mask and of its action mask."""
    ids: bytes
    """[S] int32"""
    action_mask: bytes
    """[S] uint8"""
    attention_mask: bytes | None
    """[S] uint8; None if it is 1 everywhere."""
    weights: bytes
    """[N] float64"""
    logp_counts: bytes
    """[N] int32; `_WITHOUT` for a sample without."""
    logps: bytes
    """[A] float32"""
    item_meta: list[dict[Any, Any]]
    """N dictionaries."""
    meta: dict[Any, Any]


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no form in msgpack")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_DECODER = msgspec.msgpack.Decoder(_Columns)


def encode_columns(batch: SAWBatch) -> bytes:
    """`batch` as bytes. Raises DataError, which names the sample or the key, for sequences of
    different lengths or of anything but such numbers, and for metadata that msgpack has no form
    for."""
    ids = [_to_array(item.input_ids, np.int32, item, row, "input_ids") for row, item in enumerate(batch.items)]
    actions = [_to_array(item.action_mask, np.uint8, item, row, "action_mask") for row, item in enumerate(batch.items)]
    attention = [_to_array(item.attention_mask, np.uint8, item, row, "attention_mask") for row, item in enumerate(batch.items)]
    _check_lengths(batch.items, ids, actions, attention)
    logps = [_logps_of(item, row) for row, item in enumerate(batch.items)]
    attended = _join(attention, np.uint8)
    columns = _Columns(
        version=VERSION,
        lengths=np.array([len(each) for each in ids], dtype=np.int32).tobytes(),
        ids=_join(ids, np.int32).tobytes(),
        action_mask=_join(actions, np.uint8).tobytes(),
        attention_mask=None if (attended == 1).all() else attended.tobytes(),
        weights=np.array([item.weight for item in batch.items], dtype=np.float64).tobytes(),
        logp_counts=np.array([_WITHOUT if each is None else len(each) for each in logps], dtype=np.int32).tobytes(),
        logps=_join([each for each in logps if each is not None], np.float32).tobytes(),
        item_meta=[item.meta for item in batch.items],
        meta=batch.meta,
    )
    try:
        return _ENCODER.encode(columns)
    except _REFUSED as error:
        where = _find_refused(batch)
        raise DataError(
            f"{where} cannot be sent to other ranks ({error}); make it of numbers, text, lists and dictionaries"
        ) from error


_REFUSED = (TypeError, ValueError, OverflowError, RecursionError)


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


def decode_columns(content: bytes) -> SAWBatch:
    """The batch of `encode_columns`. Its sequences are read-only arrays that share the memory of
    one copy of each column. Raises DataError for anything else."""
    try:
        columns = _DECODER.decode(content)
    except msgspec.MsgspecError as error:
        raise DataError(f"the batch that rank 0 sent cannot be read: {error}; run one version of ludic on all ranks") from error
    if columns.version != VERSION:
        raise DataError(
            f"rank 0 sent a batch of version {columns.version}, this ludic reads {VERSION}; run one version on all ranks"
        )
    lengths, counts = np.frombuffer(columns.lengths, np.int32), np.frombuffer(columns.logp_counts, np.int32)
    ids, actions = np.frombuffer(columns.ids, np.int32), np.frombuffer(columns.action_mask, np.uint8)
    attention = np.ones(len(ids), np.uint8) if columns.attention_mask is None else np.frombuffer(columns.attention_mask, np.uint8)
    logps = np.frombuffer(columns.logps, np.float32)
    parts = zip(
        *(_split(column, lengths) for column in (ids, attention, actions)),
        np.frombuffer(columns.weights, np.float64).tolist(),
        columns.item_meta,
        (
            SampleAttachments(None if count == _WITHOUT else ActorTokenLogps(part))
            for count, part in zip(counts, _split(logps, np.maximum(counts, 0)), strict=True)
        ),
        strict=True,
    )
    return SAWBatch([SAWItem(*part) for part in parts], columns.meta)


def _split(column: NDArray[Any], lengths: NDArray[np.int32]) -> list[Any]:
    """The parts of a column. Example: [5, 6, 7, 8, 9] with lengths [2, 3] is [5, 6] and
    [7, 8, 9]."""
    ends = lengths.cumsum(dtype=np.int64).tolist()
    return [column[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _join(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)


def _to_array(values: Any, dtype: Any, item: SAWItem, row: int, name: str) -> NDArray[Any]:
    """`values` as an array of `dtype`. A list is read several times faster by the standard library
    than by numpy."""
    try:
        if isinstance(values, list | tuple):
            return np.frombuffer(bytes(values) if dtype is np.uint8 else array("i", values), dtype=dtype)
        given = np.asarray(values)
        made = given.astype(dtype, copy=False)
        if given.ndim == 1 and given.dtype.kind in "biu" and (made is given or np.array_equal(made, given)):
            return made
    except (TypeError, ValueError, OverflowError):
        pass
    raise DataError(
        f"{name} of sample {row} ({item.meta.get('rollout_id', 'without rollout_id')}) cannot be sent to other ranks as a sequence of "
        f"{np.dtype(dtype).name}; give it as a list or an array of whole numbers in that range"
    )


def _logps_of(item: SAWItem, row: int) -> NDArray[np.float32] | None:
    logps = item.attachments.actor_logps
    if logps is None:
        return None
    try:
        return np.asarray(
            array("f", logps.token_logps) if isinstance(logps.token_logps, list | tuple) else logps.token_logps, np.float32
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"the log-probabilities of sample {row} cannot be sent to other ranks: {error}") from error


def _check_lengths(items: Sequence[SAWItem], *columns: Sequence[NDArray[Any]]) -> None:
    for row, parts in enumerate(zip(*columns, strict=True)):
        if len({len(part) for part in parts}) > 1:
            raise DataError(
                f"sample {row} ({items[row].meta.get('rollout_id', 'without rollout_id')}) has {len(parts[0])} input_ids, "
                f"{len(parts[1])} entries of action_mask and {len(parts[2])} of attention_mask; they must have the same length"
            )
