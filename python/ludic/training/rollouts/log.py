"""Rollouts as lines of JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.errors import DataError
from ludic.files.json_lines import json_lines
from ludic.files.jsonl import end_last_line, read_jsonl
from ludic.types import Rollout, Step, TokenTrace


def append_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Append one line a rollout: `id`, `meta`, `steps` (token traces included), `total_reward`,
    `length`, `duration_ns`.

    What a process that was killed left of a last line is cut off first: a line is one whole
    rollout.
    """
    lines = b"".join(json_lines(map(rollout_record, rollouts)))
    end_last_line(path)
    with path.open("ab") as file:
        file.write(lines)


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """What is written of a rollout. Values that JSON has no form for are written as lists,
    numbers or text."""
    return {
        "id": rollout.id,
        "meta": rollout.meta,
        "steps": rollout.steps,
        "total_reward": rollout.total_reward,
        "length": rollout.length,
        "duration_ns": rollout.duration_ns,
    }


def read_rollouts(path: str | Path) -> list[Rollout]:
    """The rollouts of a file that `append_rollouts` wrote, token traces included.

    A rollout without an id is called after its line. Raises DataError, naming the line, for one
    that is no rollout.
    """
    return [rollout_of(row, where) for where, row in read_jsonl(path)]


def rollout_of(row: Mapping[str, Any], where: str) -> Rollout:
    """The rollout that a line holds. `where` names the line."""
    steps = row.get("steps")
    if not isinstance(steps, list) or not steps:
        raise DataError(f"{where} has no steps; a rollout is a line with id, meta and steps")
    try:
        return Rollout(
            id=str(row.get("id") or where), steps=[_step(*pair) for pair in enumerate(steps)], meta=dict(row.get("meta") or {})
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{where}: a step of this rollout cannot be read: {what}") from error


def _step(number: int, fields: Mapping[str, Any]) -> Step:
    trace = fields.get("trace")
    return Step(
        index=int(fields.get("index", number)),
        prev_obs=fields["prev_obs"],
        action=fields["action"],
        next_obs=fields.get("next_obs"),
        reward=float(fields["reward"]),
        truncated=bool(fields.get("truncated", False)),
        terminated=bool(fields.get("terminated", False)),
        info=dict(fields.get("info") or {}),
        trace=None if trace is None else TokenTrace.from_dict(trace),
        ts_ns=int(fields.get("ts_ns", 0)),
    )


def write_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """One record a line, with the same care for values that JSON has no form for. Makes the
    folder, replaces the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(json_lines(map(dict, records)))
