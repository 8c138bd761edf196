"""The interface of loggers, and functions for keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self


class TrainingLogger(Protocol):
    """Logs the statistics of a step. Keys have the prefix `train/`, `eval/`, `perf/` or
    `mismatch/`. A logger may also have `sync`, which flushes its lines to disk, and `close`, which
    releases its file or connection."""

    def log(self, step: int, stats: Mapping[str, float]) -> None: ...


def sync_log(logger: object) -> None:
    """Call `sync` of a logger that has it. The trainer does so before it writes a checkpoint."""
    sync = getattr(logger, "sync", None)
    if sync is not None:
        sync()


class ClosingLogger:
    """A context manager that closes the logger at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the file or the connection."""
        raise NotImplementedError


def select_stats(stats: Mapping[str, float], keys: Sequence[str]) -> list[tuple[str, float]]:
    """Return the (name, value) pairs with the full name, or the name without prefix, in `keys`,
    in the order of `keys`, each once."""
    names = dict.fromkeys(name for key in keys for name in stats if key in (name, without_prefix(name)))
    return [(name, stats[name]) for name in names]


def without_prefix(name: str) -> str:
    """Remove the prefix: `train/loss` becomes `loss`, and `train/cispo/loss` becomes
    `cispo/loss`."""
    prefix, slash, rest = name.partition("/")
    return rest if slash and prefix in ("train", "eval", "perf") else name


def plain_values(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the statistics for services that accept only floats: a `Percent` becomes its
    fraction, a `Duration` its seconds."""
    return {key: float(value) if isinstance(value, Percent | Duration) else value for key, value in stats.items()}


class Duration(float):
    """Seconds, such as 200.0, that terminals display as 3m20s. Otherwise it is a plain float.

    >>> Duration(200.0).as_text(), Duration(7500.0).as_text(), Duration(0.4).as_text()
    ('3m20s', '2h05m', '0s')
    """

    __slots__ = ()

    def as_text(self) -> str:
        """Return the time, rounded to seconds, or to minutes from an hour on."""
        whole = round(self)
        if whole < 60:
            return f"{whole}s"
        minutes, seconds = divmod(whole, 60)
        return f"{minutes}m{seconds:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


class Percent(float):
    """A fraction, such as 0.25, that terminals display as 25.0%. Otherwise it is a plain float.

    >>> Percent(0.25) + 1, Percent(0.25).as_percentage(1)
    (1.25, '25.0%')
    """

    __slots__ = ()

    def as_percentage(self, places: int) -> str:
        """Return the percentage with `places` decimals, as text."""
        return f"{100.0 * self:.{places}f}%"
