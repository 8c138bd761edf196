"""The rollout log: a JSONL file with one rollout per line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.errors import DataError
from ludic.files.jsonl import append_jsonl, read_jsonl
from ludic.training.rollouts.episodes import EpisodeFailure
from ludic.types import Rollout, Step, TokenTrace


def append_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Append one line per rollout: `id`, `meta`, `steps` (with token traces), `total_reward`,
    `length`, `duration_ns`. An incomplete last line, left by a killed process, is removed first."""
    append_jsonl(path, map(rollout_record, rollouts))


class RolloutLog:
    """Writes the rollouts of every `every`-th batch to a file; 0 means none."""

    def __init__(self, path: str | Path, every: int = 1) -> None:
        self._path, self._every = Path(path), every

    def write(self, number: int, rollouts: Sequence[Rollout]) -> None:
        """Append the rollouts of batch `number`, from 0, if they are to be written."""
        if self._every > 0 and number % self._every == 0 and rollouts:
            append_rollouts(self._path, rollouts)


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """Return the fields of a rollout that the log has."""
    return {
        "id": rollout.id,
        "meta": rollout.meta,
        "steps": rollout.steps,
        "total_reward": rollout.total_reward,
        "length": rollout.length,
        "duration_ns": rollout.duration_ns,
    }


def append_failures(path: Path, failures: Iterable[EpisodeFailure]) -> None:
    """Append one line per episode that failed after all retries, with the fields of
    `EpisodeFailure`; `meta` comes from its request."""
    records = [vars(failure) for failure in failures]
    if records:
        append_jsonl(path, records)


def read_rollouts(path: str | Path) -> list[Rollout]:
    """Read the rollouts of a file that `append_rollouts` wrote, with their token traces.

    A rollout without an id gets `file:line` as its id. Raises DataError, naming the line, if a line
    is not a rollout.
    """
    return [parse_rollout(row, where) for where, row in read_jsonl(path)]


def parse_rollout(row: Mapping[str, Any], where: str) -> Rollout:
    """Return the rollout of a line; `where` names the line in errors."""
    steps = row.get("steps")
    if not isinstance(steps, list) or not steps:
        raise DataError(f"{where} has no steps; a rollout is a line with id, meta and steps")
    try:
        return Rollout(
            id=str(row.get("id") or where),
            steps=[_parse_step(*pair) for pair in enumerate(steps)],
            meta=dict(row.get("meta") or {}),
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{where}: a step of this rollout cannot be read: {what}") from error


def _parse_step(number: int, fields: Mapping[str, Any]) -> Step:
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
