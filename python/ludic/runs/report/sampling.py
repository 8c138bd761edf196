"""The parts of a run's summary on its sampler, from the lines of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Lines = Sequence[Mapping[str, float]]


def summarize_mismatch(lines: Lines, preflight: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The difference between trainer and sampler: means over tokens, extremes over steps. Only
    steps are measured in which the first optimizer step had samples with a weight."""
    measured = [line for line in lines if "mismatch/mean" in line]
    lags = [line["train/policy_lag"] for line in lines if "train/policy_lag" in line]
    if not measured and not lags and preflight is None:
        return None
    return {
        "preflight": None if preflight is None else dict(preflight),
        "mean": _average_over_tokens(measured, "mean"),
        "kl": _average_over_tokens(measured, "kl"),
        "max": max((line["mismatch/max"] for line in measured), default=None),
        "ess": min((line["mismatch/ess"] for line in measured), default=None),
        "lag": sum(lags) / len(lags) if lags else None,
    }


def _average_over_tokens(lines: Lines, name: str) -> float | None:
    tokens = sum(line["mismatch/tokens"] for line in lines)
    return sum(line[f"mismatch/{name}"] * line["mismatch/tokens"] for line in lines) / tokens if tokens else None


def summarize_weight_sync(lines: Lines) -> dict[str, float] | None:
    """The number of weight updates that were pushed, and seconds of one; None without any."""
    seconds = [line["perf/publish_s"] for line in lines if line.get("perf/publish_s")]
    if not seconds:
        return None
    return {"pushes": len(seconds), "mean_s": sum(seconds) / len(seconds), "max_s": max(seconds)}


def summarize_overlap(lines: Lines) -> dict[str, float] | None:
    """Seconds of generation, seconds that the trainer waited, and the share that was hidden
    behind training."""
    measured = [line for line in lines if "perf/generation_s" in line]
    generation = sum(line["perf/generation_s"] for line in measured)
    if not generation:
        return None
    waited = sum(line.get("perf/rollout_s", 0.0) for line in measured)
    return {"generation_s": generation, "waited_s": waited, "hidden": max(0.0, 1.0 - waited / generation)}


def summarize_actors(lines: Lines) -> dict[str, float] | None:
    """The actors of a run, over all its processes: how many ran on average, how many were
    restarted, how old the samples were in versions, and how long the trainer waited for them. None
    for a run without actors."""
    measured = [line for line in lines if "queue/depth" in line]
    if not measured:
        return None
    lags = [line["train/policy_lag"] for line in measured if "train/policy_lag" in line]
    alive = [line["actors/alive"] for line in measured if "actors/alive" in line]
    return {
        "alive": sum(alive) / len(alive) if alive else 0.0,
        "restarts": sum(line.get("actors/restarts", 0.0) for line in measured),
        "lag_mean": sum(lags) / len(lags) if lags else 0.0,
        "lag_max": max(lags, default=0.0),
        "waited_s": sum(line.get("perf/rollout_s", 0.0) for line in measured),
    }


def format_actors(actors: Mapping[str, float]) -> str:
    """The line of the report."""
    ran = f"{actors['alive']:.1f} ran on average, {actors['restarts']:.0f} restarts" if actors["alive"] else "not counted here"
    age = f"{actors['lag_mean']:.2f} versions old on average, at most {actors['lag_max']:g}"
    return f"[bold]Actors[/]: {ran}; samples were {age}; the trainer waited {actors['waited_s']:.1f} s for them"
