"""Records as lines of JSON. It never fails: what JSON has no form for is written as the next
best."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

DEEPEST = 64
"""Levels of nesting that are written where a value cannot be written as it is."""
LONGEST_INTEGER_BITS = 4096
"""Longer integers are not written in digits: Python reads no more than 4,300 back."""


def json_lines(records: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Each record and a line break.

    Numbers and arrays of numpy and torch are numbers and lists, numbers that are not finite are
    null, what else JSON has no form for is text. A value that contains itself, is nested without
    end, or fails when it is looked at is cut there, with a note in its place; one warning says how
    many records were.
    """
    cut: list[Exception] = []
    for record in records:
        try:
            yield _ENCODER.encode(record) + b"\n"
            continue
        except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
            pass
        except Exception as error:
            cut.append(error)
        yield json.dumps(_json_form(record, ()), allow_nan=False).encode() + b"\n"
    if cut:
        logger.warning(
            "%d records hold what cannot be written (%s), and a note in its place instead", len(cut), type(cut[0]).__name__
        )


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def _json_form(value: Any, within: tuple[int, ...]) -> Any:
    """`within`: the identities of the values that this one is part of."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= LONGEST_INTEGER_BITS else f"<an integer of {value.bit_length()} bits>"
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if id(value) in within:
        return f"<this {type(value).__name__} contains itself>"
    if len(within) >= DEEPEST:
        return f"<nested deeper than {DEEPEST} levels>"
    try:
        return _parts(value, (*within, id(value)))
    except Exception as error:
        return f"<this {type(value).__name__} cannot be written: {type(error).__name__}>"


def _parts(value: Any, within: tuple[int, ...]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json_form(part, within) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json_form(part, within) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _json_form(getattr(value, field.name), within) for field in dataclasses.fields(value)}
    return _json_form(msgspec.to_builtins(value, enc_hook=_plain), within)
