"""Loggers with `log(metrics, step)` and `finish()`, over those of `ludic.training.loggers`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Protocol

from ludic.errors import ConfigError, ConfigTypeError, DataError
from ludic.files.jsonl import parse_object
from ludic.training.loggers.base import TrainingLogger
from ludic.training.loggers.jsonl import JSONLLogger as JSONLines
from ludic.training.loggers.wandb import WandbLogger as WandbRun

logger = logging.getLogger(__name__)

Metrics = Mapping[str, Any]


class MetricsLogger(Protocol):
    """What the training loops log to."""

    def log(self, metrics: Metrics, step: int) -> None:
        """Log the metrics of a step."""
        ...

    def finish(self) -> None:
        """Write what is left and release files and connections."""
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
        if max_lines < 1:
            raise ConfigError(f"max_lines ({max_lines}) must be at least 1")
        self.log_dir, self.max_lines = Path(log_dir), max_lines
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.path = self.log_dir / "metrics.jsonl"
        self._file = JSONLines(self.path)
        self._num_lines = _count_lines(self.path)

    def log(self, metrics: Metrics, step: int) -> None:
        _check_step(step)
        values = {key: _to_plain(key, value) for key, value in metrics.items() if key != "step"}
        if self._num_lines >= self.max_lines:
            self._rotate()
        self._file.log(step, {"timestamp": time.time(), **values})
        self._num_lines += 1

    def _rotate(self) -> None:
        self._file.close()
        numbers = (number for number in range(1, 1 << 31) if not self.log_dir.joinpath(f"metrics.{number}.jsonl").exists())
        self.path.rename(self.log_dir / f"metrics.{next(numbers)}.jsonl")
        self._num_lines = 0

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
        raise ConfigTypeError(
            f"a {type(metrics_logger).__name__} has no {' and no '.join(missing)}; a metrics logger has log(metrics, step) and finish()"
        )
    return _AsTrainingLogger(metrics_logger)


def compute_stats_from_jsonl(metrics_file: str | Path, key: str) -> dict[str, float]:
    """Mean, min, max and population standard deviation of a metric over the lines that have it as a
    number; zeros if none has. Lines that a killed process left unfinished are skipped, with a
    warning."""
    values = [row[key] for row in _read_complete_lines(Path(metrics_file)) if _is_number(row.get(key))]
    if not values:
        return {"mean": 0.0, "min": 0.0, "max": 0.0, "std": 0.0}
    return {"mean": fmean(values), "min": float(min(values)), "max": float(max(values)), "std": pstdev(values)}


def _read_complete_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; JSONLLogger(log_dir) writes log_dir/metrics.jsonl")
    rows, damaged = [], 0
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            rows += [parse_object(line, f"{path}:{number}")] if line.strip() else []
        except DataError:
            damaged += 1
    if damaged:
        logger.warning("%s has %d lines that were not written whole; they are skipped", path, damaged)
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"step ({step!r}) must be a whole number from 0; the call is log(metrics, step)")


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0
