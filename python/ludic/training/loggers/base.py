"""What the trainer tells a logger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ludic.training.loggers.percent import Percent


class TrainingLogger(Protocol):
    """Takes the statistics of a step. Keys have a prefix: `train/`, `eval/` or `perf/`."""

    def log(self, step: int, stats: Mapping[str, float]) -> None: ...


@runtime_checkable
class SyncedLogger(Protocol):
    """A logger whose lines outlive the machine once `sync` returns. The trainer calls it before
    it writes a checkpoint."""

    def sync(self) -> None: ...


def select(stats: Mapping[str, float], keys: Sequence[str]) -> list[tuple[str, float]]:
    """The statistics whose full name, or name without prefix, is among `keys`; in the order of
    `keys`."""
    return [(name, stats[name]) for key in keys for name in stats if key in (name, bare(name))]


def bare(name: str) -> str:
    """`train/loss` is `loss`; `train/cispo/loss` is `cispo/loss`."""
    prefix, slash, rest = name.partition("/")
    return rest if slash and prefix in ("train", "eval", "perf") else name


def plain_values(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The same for services that know floats alone: a `Percent` is its fraction."""
    return {key: float(value) if isinstance(value, Percent) else value for key, value in stats.items()}
