"""What a logger is, and how keys and values are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ludic.training.loggers.percent import Percent


class TrainingLogger(Protocol):
    """Takes the statistics of a step. Keys have a prefix: `train/`, `eval/` or `perf/`."""

    def log(self, step: int, stats: Mapping[str, float]) -> None: ...


@runtime_checkable
class SyncedLogger(Protocol):
    """A logger whose lines survive a crash of the machine once `sync` returns. The trainer calls it
    before it writes a checkpoint."""

    def sync(self) -> None: ...


@runtime_checkable
class ClosableLogger(Protocol):
    """A logger that holds a file or a connection until `close`."""

    def close(self) -> None: ...


def select_stats(stats: Mapping[str, float], keys: Sequence[str]) -> list[tuple[str, float]]:
    """The statistics whose full name, or name without prefix, is in `keys`, in the order of
    `keys`."""
    return [(name, stats[name]) for key in keys for name in stats if key in (name, without_prefix(name))]


def without_prefix(name: str) -> str:
    """The name without its prefix: `train/loss` becomes `loss`, `train/cispo/loss` `cispo/loss`."""
    prefix, slash, rest = name.partition("/")
    return rest if slash and prefix in ("train", "eval", "perf") else name


def plain_values(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The statistics for services that accept floats only: a `Percent` becomes its fraction."""
    return {key: float(value) if isinstance(value, Percent) else value for key, value in stats.items()}
