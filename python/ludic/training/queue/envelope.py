"""What all entries of a log have in common: a header with a checksum around msgpack. Numbers of
tokens are in it as bytes (`columns`).

    0       4        5     6              22
    | LUDQ | version | kind | xxh3-128 of the body | body ...

Bytes that were changed on their way are found by the checksum before anything is decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import xxhash

from ludic.errors import ConfigError, DataError
from ludic.files.json_values import to_builtin
from ludic.training.queue.base import MAX_PAYLOAD_BYTES
from ludic.types import group_of

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
    max_groups: int | None = None
    """Groups (`group_id`) that the rollouts are of; None: any number."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_rollouts", "max_steps", "max_groups"):
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


def check_meta(meta: Mapping[str, Any], what: str) -> None:
    """Raise EntryError for metadata that the trainer computes with and that have another type."""
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
