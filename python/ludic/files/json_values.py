"""Encodes records as lines of JSON, and parses JSON. Encoding never fails: a value that JSON cannot
express is written in the next best form."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ludic.errors import DataError

logger = logging.getLogger(__name__)

DEEPEST = 64
"""Levels of nesting that are written of a record that the fast encoder refuses."""
LONGEST_INTEGER_BITS = 4096
"""Longer integers are not written in digits: Python reads back at most 4,300 digits."""


def encode_lines(records: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Each record as JSON, with a line break.

    Numbers and arrays of numpy and torch become numbers and lists, numbers that are not finite
    become null, and anything else that JSON cannot express becomes text. A note replaces a value
    that contains itself, is nested too deeply, or raises when it is read; one warning counts such
    records.
    """
    failures: list[Exception] = []
    for record in records:
        try:
            line = _ENCODER.encode(record)
        except Exception as error:
            if not isinstance(error, UnicodeEncodeError):  # half of a surrogate pair, which only an escape can write
                failures.append(error)
            line = json.dumps(make_encodable(record), allow_nan=False).encode()
        yield line + b"\n"
    if failures:
        logger.warning(
            "%d records hold what cannot be written (%s), and a note in its place instead",
            len(failures),
            type(failures[0]).__name__,
        )


def parse_json(text: str | bytes, where: str) -> Any:
    """The JSON value of a text. Raises DataError, naming `where` and the position of the fault; an
    object with a key twice is one."""
    try:
        return json.loads(text, object_pairs_hook=_make_object)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise DataError(f"{where} is not JSON: {error.msg} at {position}") from error
    except ValueError as error:  # not UTF-8, a key twice, an integer of more than 4,300 digits
        raise DataError(f"{where} is not JSON: {str(error).partition(';')[0]}") from error
    except RecursionError as error:
        raise DataError(f"{where} is nested too deeply") from error


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        key, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {key!r} {count} times")
    return made


def to_builtin(value: Any) -> Any:
    """A value that an encoder has no form for: numbers and arrays of numpy and torch as numbers and
    lists, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def is_finite(value: Any) -> bool:
    """Whether the value is a number that a float can hold; a truth value is none."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond 1.8e308
        return False


def flatten_settings(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of nested settings. Example: `{"trainer": {"lr": 0.1}}` has `trainer.lr`, 0.1.
    An empty section is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_ENCODER = msgspec.json.Encoder(enc_hook=to_builtin)


def make_encodable(value: Any, within: tuple[int, ...] = ()) -> Any:
    """`value` made of what JSON can express, by the rules of `encode_lines`: a number that is not
    finite is None. `within`: the ids of the values that contain it, which show whether a value
    contains itself."""
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
    within = (*within, id(value))
    try:
        if isinstance(value, Mapping):
            return {str(key): make_encodable(part, within) for key, part in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [make_encodable(part, within) for part in value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            held = getattr(value, "__dict__", {field.name: None for field in dataclasses.fields(value)})  # or slots
            names = [field.name for field in dataclasses.fields(value) if field.name in held]  # as the fast encoder
            return {name: make_encodable(getattr(value, name), within) for name in names}
        return make_encodable(msgspec.to_builtins(value, enc_hook=to_builtin), within)
    except Exception as error:
        return f"<this {type(value).__name__} cannot be written: {type(error).__name__}>"
