"""What all entries of a log have in common: a header with a checksum around msgpack, and columns of
numbers as bytes.

    0       4        5     6              22
    | LUDQ | version | kind | xxh3-128 of the body | body ...

Bytes that were changed on their way are found by the checksum before anything is decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from ludic.errors import ConfigError, DataError
from ludic.files.json_values import to_builtin
from ludic.training.queue.base import MAX_PAYLOAD_BYTES

VERSION = 1
GROUP, SAMPLES = 1, 2
"""Kinds of entries."""
_HEADER = struct.Struct(">4sBB16s")
_MAGIC = b"LUDQ"
T = TypeVar("T")


class EntryError(DataError):
    """An entry that cannot be trained on; it is set aside with this error's message."""


@dataclass(frozen=True)
class EntryLimits:
    """What an entry may hold. Larger ones are refused before they are decoded, or before they are
    sent."""

    max_bytes: int = MAX_PAYLOAD_BYTES
    """Size of the entry."""
    max_rollouts: int = 4096
    """Rollouts of a group, or samples."""
    max_steps: int = 4096
    """Steps of a rollout."""
    vocab_size: int | None = None
    """Token ids must be smaller; None: any id that fits 32 bits."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_rollouts", "max_steps", "vocab_size"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} ({value}) must be > 0")


def seal(kind: int, content: msgspec.Struct, limits: EntryLimits) -> bytes:
    """The entry with this content. Raises EntryError if it is too large or holds what msgpack has
    no form for. Numbers and arrays of numpy and torch become numbers and lists."""
    try:
        body = _encode(content)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EntryError(f"a group holds a value that cannot be sent: {error}") from error
    if _HEADER.size + len(body) > limits.max_bytes:
        raise EntryError(
            f"a group of {len(body)} bytes is larger than the limit of {limits.max_bytes}; play smaller groups, or raise the limit"
        )
    return _HEADER.pack(_MAGIC, VERSION, kind, xxhash.xxh3_128_digest(body)) + body


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
    if version != VERSION:
        raise EntryError(f"the entry has version {version}, this ludic reads {VERSION}; run the same ludic everywhere")
    if found != kind:
        raise EntryError(f"the entry is of kind {found}, and {kind} is expected: do groups and samples share a queue?")
    body = memoryview(payload)[_HEADER.size :]
    if xxhash.xxh3_128_digest(body) != digest:
        raise EntryError("the entry is damaged: its checksum differs")
    try:
        return decoder(body)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise EntryError(f"the entry has another structure: {error}") from error


def ids_to_bytes(ids: Any) -> bytes:
    """Token ids as 32-bit integers, little-endian. Raises OverflowError for larger ones."""
    return np.asarray(ids, dtype="<i4").tobytes() if len(ids) else b""


def ids_from_bytes(column: bytes, limits: EntryLimits) -> NDArray[np.int32]:
    """The ids of `ids_to_bytes`, in their memory. Raises EntryError unless all are in the
    vocabulary."""
    if len(column) % 4:
        raise EntryError(f"a column of token ids has {len(column)} bytes, which is no multiple of 4")
    ids = np.frombuffer(column, dtype="<i4")
    end = 2**31 if limits.vocab_size is None else limits.vocab_size
    if len(ids) and int(ids.view("<u4").max()) >= end:  # a negative id is one of 2**31 or more
        raise EntryError(f"token ids are {ids.min()} to {ids.max()}; the vocabulary has 0 to {end - 1}")
    return ids


def floats_to_bytes(values: Any) -> bytes:
    """Numbers as 32-bit floats if that loses nothing, as with what comes from a model in this
    process, else as 64-bit ones."""
    wide = np.asarray(values, dtype="<f8")
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype("<f4")
    return (narrow if np.array_equal(narrow, wide) else wide).tobytes()


def floats_from_bytes(column: bytes, length: int) -> NDArray[np.float64]:
    """The `length` numbers of `floats_to_bytes`, as 64-bit floats. Raises EntryError unless there
    are so many, all finite."""
    if len(column) not in (4 * length, 8 * length):
        raise EntryError(f"a column of {len(column)} bytes cannot hold the log-probabilities of {length} tokens")
    values = np.frombuffer(column, dtype="<f4" if len(column) == 4 * length else "<f8")
    if not np.isfinite(values).all():
        raise EntryError("log-probabilities must be finite")
    return values.astype(np.float64)


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
