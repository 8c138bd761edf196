"""The folder of a run as others read it: how it ended, what it measured, and its settings. Nothing
in the folder is changed, and a run of any command and age can be read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ludic.errors import CheckpointError, ConfigError
from ludic.files.atomic import read_json
from ludic.files.json_values import flatten_settings, is_finite
from ludic.recipes.compose import read_yaml
from ludic.runs.directory import DONE, check_is_run, is_run
from ludic.runs.lock import LAUNCH_LOCK, is_locked

RUNNING = "running"
HELD_OUT = ("sampled_reward", "loss", "eval_pairwise_accuracy", "eval_rewards/accuracies")
"""The measurement that stands for a run in a table, of `train`, `sft`, `train-rm` and `dpo`."""
PLACES = ("name", "output")
"""Settings in which all runs differ."""


_NAMES = {dict: "an object", str: "a text", int: "a whole number", float: "a number"}
"""Types of values in a JSON file, as messages name them. A whole number is a number too."""
PROGRESS = {"command": str, "phase": str, "failed": str, "steps": int, "seconds": dict, "before": dict, "after": dict}
SUMMARY = {
    **dict.fromkeys(("before", "after", "intervals", "versions", "heldout", "episodes", "samples"), dict),
    "algorithm": str,
    "solved_at": float,
}
"""Keys that are read of the two files, each with the type of its value unless it is null."""


@dataclass(frozen=True)
class RunRecord:
    """What the files of a run say."""

    path: Path
    command: str
    """train, sft, train-rm or dpo."""
    status: str
    """running, finished, interrupted or failed."""
    algorithm: str | None
    model: str | None
    steps: int
    """Steps that were taken, without the warm-up."""
    steps_asked: int | None
    """Steps that the settings ask for; None for a run that counts epochs."""
    before: Mapping[str, Any]
    """Held-out rates before training; empty if they were not measured."""
    after: Mapping[str, Any]
    """Held-out rates at the end; empty until the run has finished all of its steps."""
    intervals: Mapping[str, Mapping[str, Sequence[float | None]]]
    """95 % intervals `[low, high]` by rate, for `before` and `after`."""
    wall_s: float
    failed: str | None
    """The error that ended it."""
    settings: Mapping[str, Any]
    """The settings, flat: `trainer.lr` to its value."""
    summary: Mapping[str, Any]
    """The content of summary.json; empty before the first report."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def held_out(self) -> tuple[str, float | None, float | None] | None:
        """(name of the rate that stands for the run, before, after); None if nothing was
        measured."""
        name = next((name for name in HELD_OUT if name in self.before or name in self.after), None)
        return None if name is None else (name, self.before.get(name), self.after.get(name))


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run's; otherwise the runs in it, the oldest first. Raises
    ConfigError for a folder that does not exist."""
    if is_run(folder):
        return [folder]
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; name the folder of a run, or one with runs such as runs/")
    runs = [path for path in folder.iterdir() if is_run(path) and not path.name.startswith(".")]
    return sorted(runs, key=lambda path: ((path / "config.yaml").stat().st_mtime, path.name))


def read_run(path: Path) -> RunRecord:
    """Read the small files of the run. Raises CheckpointError for a folder without a run, or with
    damaged files."""
    check_is_run(path)
    progress = _read_object(path / "progress.json", PROGRESS)
    summary = _read_object(path / "summary.json", SUMMARY) if (path / "summary.json").is_file() else {}
    tree: Any = OmegaConf.to_container(read_yaml(path / "config.yaml"), resolve=False)
    flat = flatten_settings(tree) if isinstance(tree, dict) else ()
    settings = {path: _name_numbers(value) for path, value in flat if not isinstance(value, Mapping)}
    wall_s = (progress.get("seconds") or {}).get("wall", 0.0)
    if not is_finite(wall_s):
        raise CheckpointError(f"{path / 'progress.json'}: wall ({_shorten(wall_s)}) must be a number; the file is damaged")
    command = str(progress.get("command", "train"))
    before, after = (_read_rates(summary.get(name), progress.get(name)) for name in ("before", "after"))
    if command in ("train-rm", "dpo"):  # their summaries have these among all else
        after = _read_rates(progress.get("after"), None)
    intervals = _read_intervals(summary, path / "summary.json")
    if progress.get("phase") != DONE:  # steps were added: summary.json belongs to the shorter run
        after, intervals = {}, {when: rates for when, rates in intervals.items() if when != "after"}
    if is_locked(path) or is_locked(path, LAUNCH_LOCK):
        status = RUNNING
    elif progress.get("failed"):
        status = "failed"
    else:
        status = "finished" if progress.get("phase") == DONE else "interrupted"
    return RunRecord(
        path=path,
        command=command,
        status=status,
        algorithm=summary.get("algorithm")
        or {"sft": "sft", "train-rm": "bradley_terry"}.get(command, _text(settings, "algorithm")),
        model=_text(settings, "model"),
        steps=_count_steps(path, progress, status),
        steps_asked=settings.get("steps"),
        before=before,
        after=after,
        intervals=intervals,
        wall_s=float(wall_s),
        failed=progress.get("failed") if status == "failed" else None,
        settings=settings,
        summary=summary,
    )


def list_differences(records: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Setting -> its value in each run (None if a run does not have it), for those settings in
    which the runs differ. Names and places are left out."""
    keys = dict.fromkeys(key for record in records for key in record.settings if key not in PLACES)
    values = {key: [record.settings.get(key) for record in records] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _name_numbers(value: Any) -> Any:
    """`value` with texts in place of numbers that are not finite, which are not equal to themselves
    (nan) and have no form in JSON. Example: inf is "inf"."""
    if isinstance(value, list):
        return [_name_numbers(part) for part in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _read_rates(from_summary: Any, from_progress: Any) -> dict[str, float]:
    """The rates of a measurement; before there is a summary, those that progress.json has."""
    source = from_summary or from_progress or {}
    return {key: value for key, value in source.items() if _is_number(value)}


def _read_object(path: Path, types: Mapping[str, type]) -> dict[str, Any]:
    """The JSON object in a file of a run. Raises CheckpointError for a value of another type than
    `types` has for its key."""
    content = read_json(path)
    for key, kind in types.items():
        value = content.get(key)
        is_kind = _is_number(value) if kind is float else isinstance(value, kind) and not isinstance(value, bool)
        if value is not None and not is_kind:
            raise CheckpointError(f"{path}: {key} ({_shorten(value)}) must be {_NAMES[kind]}; the file is damaged")
    return content


def _text(settings: Mapping[str, Any], key: str) -> str | None:
    value = settings.get(key)
    return None if value is None else str(value)


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _read_intervals(summary: Mapping[str, Any], path: Path) -> dict[str, dict[str, list[float | None]]]:
    """Each interval is two numbers, or nulls where there is none."""
    found = summary.get("intervals") or {}
    read: dict[str, dict[str, list[float | None]]] = {}
    for when in ("before", "after"):
        rates = found.get(when) or {}
        if not isinstance(rates, dict) or not all(map(_is_interval, rates.values())):
            raise CheckpointError(f"{path}: intervals.{when} ({_shorten(rates)}) must have two numbers for each rate")
        if when in found:
            read[when] = dict(rates)
    return read


def _is_interval(value: Any) -> bool:
    pair = [None, None] if value is None else value
    return isinstance(pair, list) and len(pair) == 2 and all(bound is None or _is_number(bound) for bound in pair)


def _is_number(value: Any) -> bool:
    """Whether it is one that a float can hold, or one of a run that diverged: nan or infinite."""
    return isinstance(value, float) or is_finite(value)


def _count_steps(path: Path, progress: Mapping[str, Any], status: str) -> int:
    """The steps of progress.json, which a run writes when a phase ends; for a run that was cut off
    or goes on, the last step in metrics.jsonl."""
    done = int(progress.get("steps") or 0)
    if status == "finished":
        return done
    return max([done, *(int(line["step"]) for line in read_steps(path) if line.get("phase") not in (None, "warm_up"))])


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of metrics.jsonl, in the order of the file. Each has `step`."""
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        return
    with metrics.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # the last line of a run that goes on or was killed
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record
