"""Loggers with `log(metrics, step)` and `finish()`, over the loggers of
`ludic.training.loggers`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Protocol, runtime_checkable

from ludic.errors import ConfigTypeError, DataError, check_value
from ludic.files.jsonl import parse_object, truncate_log
from ludic.training.loggers.base import TrainingLogger
from ludic.training.loggers.local import JSONLLogger as JSONLines
from ludic.training.loggers.trackers import WandbLogger as WandbRun

logger = logging.getLogger(__name__)

Metrics = Mapping[str, Any]


class MetricsLogger(Protocol):
    """What the training loops log to. With the methods of `ResumableLogger`, a run that is killed
    and resumed logs each step once."""

    def log(self, metrics: Metrics, step: int) -> None:
        """Log the metrics of a step."""
        ...

    def finish(self) -> None:
        """Write the remaining metrics and release files and connections."""
        ...


@runtime_checkable
class ResumableLogger(Protocol):
    """A logger whose lines after a checkpoint can be removed: a run that goes on from it takes
    these steps again."""

    def sync(self) -> None:
        """Write all lines to disk. Called before each checkpoint."""
        ...

    def mark(self) -> Any:
        """Where the next line will be, as a JSON value that the checkpoint keeps."""
        ...

    def cut(self, mark: Any, step: int) -> None:
        """Remove what was logged after `mark`, which is of later steps than `step`."""
        ...


class JSONLLogger:
    """Appends `{"step": ..., "timestamp": ..., <metrics>}` to `metrics.jsonl` in a folder.

    Values are numbers or text; those that are not finite become null. A key `step` among the
    metrics is left out: the argument says it. After `max_lines` lines the file is renamed to
    `metrics.1.jsonl`, then `metrics.2.jsonl` and so on, and a new one begins.

    >>> logger = JSONLLogger("logs/experiment_001")
    >>> logger.log({"loss": 0.5}, step=42)
    >>> logger.finish()
    """

    def __init__(self, log_dir: str | Path, max_lines: int = 1_000_000) -> None:
        check_value("max_lines", max_lines, least=1)
        self.log_dir, self.max_lines = Path(log_dir), max_lines
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.path = self.log_dir / "metrics.jsonl"
        self._file = JSONLines(self.path)
        self._num_lines = _count_lines(self.path)

    def log(self, metrics: Metrics, step: int) -> None:
        _check_step(step)
        values = {key: _to_plain(key, value) for key, value in metrics.items() if key != "step"}
        if self._num_lines >= self.max_lines:
            self._file.close()
            self.path.rename(self._name_full(len(self._list_full()) + 1))
            self._num_lines = 0
        self._file.log(step, {"timestamp": time.time(), **values})
        self._num_lines += 1

    def _name_full(self, number: int) -> Path:
        return self.log_dir / f"metrics.{number}.jsonl"

    def _list_full(self) -> list[Path]:
        """The files that were renamed, the oldest first."""
        return list(takewhile(Path.exists, map(self._name_full, count(1))))

    def sync(self) -> None:
        """Write all lines to disk."""
        self._file.sync()

    def mark(self) -> int:
        """The size of all files in bytes."""
        return sum(path.stat().st_size for path in [*self._list_full(), self.path] if path.exists())

    def cut(self, mark: int, step: int) -> None:
        """Remove what was logged after the first `mark` bytes. A file that was full and is cut is
        `metrics.jsonl` again. Lines of `step` or of earlier ones are of another log, and stay."""
        self._file.close()
        files = [path for path in [*self._list_full(), self.path] if path.exists()]
        while files and files[0].stat().st_size < mark:
            mark -= files.pop(0).stat().st_size
        if not files:
            return
        removed = b"".join([files[0].read_bytes()[mark:], *(path.read_bytes() for path in files[1:])])
        if not all(_is_later(line, step) for line in removed.splitlines()):
            logger.warning("%s has other lines than the run had at step %d; they stay", self.path, step)
            return
        for path in reversed(files[1:]):  # the newest first, so that this can be killed and done again
            path.unlink()
        truncate_log(files[0], mark)
        files[0].replace(self.path)
        self._num_lines = _count_lines(self.path)

    def finish(self) -> None:
        """Close the file. `log` opens it again."""
        self._file.close()


class WandbLogger:
    """Logs to a run of Weights & Biases: to the open one, else to one that it starts and ends."""

    def __init__(
        self, project: str, name: str | None = None, entity: str | None = None, tags: Sequence[str] | None = None
    ) -> None:
        init = {} if entity is None else {"entity": entity}
        self._run = WandbRun(init_kwargs=init, project=project, name=name, tags=tags)

    def log(self, metrics: Metrics, step: int) -> None:
        _check_step(step)
        self._run.log(step, {key: _to_plain(key, value) for key, value in metrics.items() if key != "step"})

    def finish(self) -> None:
        self._run.close()


class CompositeLogger:
    """Passes metrics on to several loggers. If one raises, the error is logged, and the others
    still get the metrics."""

    def __init__(self, loggers: Sequence[MetricsLogger]) -> None:
        self.loggers = list(loggers)

    def log(self, metrics: Metrics, step: int) -> None:
        _check_step(step)
        for each in self.loggers:
            try:
                each.log(metrics, step)
            except Exception:
                logger.exception("%s failed at step %d", type(each).__name__, step)

    def sync(self) -> None:
        for each in self.loggers:
            if isinstance(each, ResumableLogger):
                each.sync()

    def mark(self) -> list[Any]:
        """The mark of each logger; None for one that has none."""
        return [each.mark() if isinstance(each, ResumableLogger) else None for each in self.loggers]

    def cut(self, mark: list[Any], step: int) -> None:
        """Cut each logger that has a mark."""
        for each, own in zip(self.loggers, mark, strict=False):
            if isinstance(each, ResumableLogger) and own is not None:
                each.cut(own, step)

    def finish(self) -> None:
        for each in self.loggers:
            try:
                each.finish()
            except Exception:
                logger.exception("%s could not finish", type(each).__name__)


class _AsTrainingLogger:
    """A `MetricsLogger` as the trainer calls it."""

    def __init__(self, metrics_logger: MetricsLogger) -> None:
        self._logger = metrics_logger

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        self._logger.log(dict(stats), step)

    def close(self) -> None:
        self._logger.finish()


def as_training_logger(metrics_logger: MetricsLogger) -> TrainingLogger:
    """The logger for `Trainer`; closing it finishes `metrics_logger`. Raises ConfigTypeError for an
    object without `log` and `finish`."""
    missing = [name for name in ("log", "finish") if not hasattr(metrics_logger, name)]
    if missing:
        raise ConfigTypeError(f"metrics_logger ({type(metrics_logger).__name__}) must have the method {' and '.join(missing)}")
    return _AsTrainingLogger(metrics_logger)


def compute_stats_from_jsonl(metrics_file: str | Path, key: str) -> dict[str, float]:
    """Mean, min, max and population standard deviation of a metric over the lines that have it as a
    number; zeros if none has. Lines that a killed process left unfinished are skipped, with a
    warning."""
    path = Path(metrics_file)
    if not path.is_file():
        raise DataError(f"{path} does not exist; JSONLLogger(log_dir) writes log_dir/metrics.jsonl")
    values, damaged = [], 0
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            value = parse_object(line, f"{path}:{number}").get(key) if line.strip() else None
        except DataError:
            damaged += 1
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            values.append(value)
    if damaged:
        logger.warning("%s has %d lines that were not written whole; they are skipped", path, damaged)
    if not values:
        return {"mean": 0.0, "min": 0.0, "max": 0.0, "std": 0.0}
    return {"mean": fmean(values), "min": float(min(values)), "max": float(max(values)), "std": pstdev(values)}


def _to_plain(key: str, value: Any) -> Any:
    """A number, text or None. Scalars of numpy and torch become numbers."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise ConfigTypeError(f"the metric {key} is an array; log a number of it, such as its mean") from error
    if value is not None and not isinstance(value, int | float | str):
        raise ConfigTypeError(f"the metric {key} is a {type(value).__name__}; log a number or a text")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_step(step: Any) -> None:
    check_value("step", step, "the call is log(metrics, step)", whole=True, least=0)


def _is_later(line: bytes, step: int) -> bool:
    """Whether a line is of a later step; a line that was not written whole may be of any."""
    try:
        found = parse_object(line, "a line").get("step")
    except DataError:
        return True
    return isinstance(found, int) and found > step


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0
