"""Rollouts as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ludic.types import Rollout


def _plain(value: Any) -> Any:
    """A form that JSON has: numbers and arrays of numpy and torch as numbers and lists, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def append_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Append one line a rollout: `id`, `meta`, `steps` (token traces included), `total_reward`, `length`, `duration_ns`."""
    lines = b"".join(_line(rollout_record(rollout)) for rollout in rollouts)
    with path.open("ab") as file:
        file.write(lines)


def _line(record: dict[str, Any]) -> bytes:
    try:
        return _ENCODER.encode(record) + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        return json.dumps(msgspec.to_builtins(record, enc_hook=_plain, str_keys=True)).encode() + b"\n"


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """What is written of a rollout. Values that JSON has no form for are written as lists, numbers or text."""
    return {
        "id": rollout.id,
        "meta": rollout.meta,
        "steps": rollout.steps,
        "total_reward": rollout.total_reward,
        "length": rollout.length,
        "duration_ns": rollout.duration_ns,
    }


def write_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """One record a line, with the same care for values that JSON has no form for. Makes the folder, replaces the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(_line(dict(record)) for record in records)
