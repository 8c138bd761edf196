"""What one training step measured, and the statistics that it logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ludic.training import ranks
from ludic.training.backend import BackwardResult
from ludic.training.batching.mini_batches import PADDING_KEYS, MacroBatch, MiniBatch
from ludic.training.batching.pair_batches import PAIR_KEYS
from ludic.training.config import TrainerConfig
from ludic.training.loss.mismatch import PREFIX, is_mismatch_sum
from ludic.training.stats import COUNT_KEYS, SAMPLED_REWARD, Reducer, batch_stats, combine_micro_stats, to_host
from ludic.training.timings import PhaseTimer
from ludic.training.types import SAWBatch


class StepRecord:
    """Collects results while a step runs. Tensors stay on the device until `stats` brings them over together."""

    def __init__(self, batch: SAWBatch, macro: MacroBatch, timer: PhaseTimer) -> None:
        self.batch, self.macro, self.timer = batch, macro, timer
        self._losses: list[torch.Tensor] = []
        self._steps: list[dict[str, float]] = []
        self._micro_stats: list[dict[str, Any]] = []
        self._micro_sizes: list[float] = []
        self._padding = dict.fromkeys(PADDING_KEYS, 0.0)
        self._skipped = 0

    def add(self, result: BackwardResult, step: dict[str, float], *, at_step_start: bool = True) -> None:
        """One optimizer step. `at_step_start`: its log-probabilities are those of the weights that the training step began with; only they
        say how far trainer and sampler are apart, the others also hold what was learnt since."""
        self._losses.append(result.loss)
        self._steps.append(step)
        self._micro_stats.extend(stats if at_step_start else _without_mismatch(stats) for stats in result.micro_stats)
        self._micro_sizes.extend(result.micro_sizes)

    @property
    def optimizer_steps(self) -> int:
        """Taken so far."""
        return len(self._steps)

    def add_padding(self, mini_batch: MiniBatch) -> None:
        """Its token counts; and its collation, which ran between the passes, is batching."""
        for key, value in mini_batch.padding().items():
            self._padding[key] += value
        self._skipped += mini_batch.num_skipped
        self.timer.add("batching", mini_batch.collate_s)
        self.timer.add("forward_backward", -mini_batch.collate_s)

    def stats(self, reducers: Mapping[str, Reducer], cfg: TrainerConfig) -> dict[str, float]:
        """All statistics of the step. `loss` and `grad_norm` are means over its optimizer steps."""
        measured = {
            **combine_micro_stats(self._micro_stats, self._micro_sizes),
            "loss": torch.stack(self._losses).mean() if self._losses else 0.0,
            "grad_norm": _mean([step["grad_norm"] for step in self._steps]),
        }
        if self._steps:
            measured["lr"] = self._steps[-1]["lr"]
        stats = {**to_host(measured), **batch_stats([self.batch], reducers=reducers), **self._counts()}
        if cfg.reduce_stats_across_ranks:
            stats = reduce_over_ranks(stats, reducers, cfg.model_device)
        return {**stats, **self._padding, **self.timer.stats()}

    def _counts(self) -> dict[str, float]:
        counts = {
            "optimizer_steps": float(len(self._steps)),
            **self.macro.counts(),
            "zero_weight_skipped": float(self._skipped),
        }
        for key in ("zvp_filter_frac", *EPISODE_KEYS):
            if key in self.batch.meta:
                counts[key] = float(self.batch.meta[key])
        for key, name in (("generation_s", "perf/generation_s"), ("policy_lag", "policy_lag")):
            if key in self.batch.meta:
                counts[name] = float(self.batch.meta[key])
        if "avg_total_reward" in self.batch.meta:
            counts[SAMPLED_REWARD] = float(self.batch.meta["avg_total_reward"])
        return counts


EPISODE_KEYS = ("num_retried_episodes", "num_failed_episodes", "num_cancelled_episodes", "num_dropped_groups")
"""What a rollout engine counts of episodes that went wrong."""
SUMMED = COUNT_KEYS | {
    "loss",
    "seq_len_truncated_empty",
    "samples_without_actions",
    "zero_weight_skipped",
    *EPISODE_KEYS,
    *PAIR_KEYS,
}
"""Over ranks. A rank's loss is already its share of the mini-batch's."""


def _without_mismatch(stats: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stats.items() if not is_mismatch_sum(key)}


def reduce_over_ranks(
    stats: Mapping[str, float], reducers: Mapping[str, Reducer], device: torch.device | str
) -> dict[str, float]:
    """Statistics of all ranks: `gpu_*` and `mismatch/max` are maxima, counts and sums are summed, rates by rollouts are weighted by
    rollouts and the rest by samples. Every rank must have the same keys."""
    if not ranks.is_distributed():
        return dict(stats)
    largest = [key for key in stats if key.startswith("gpu_") or key == f"{PREFIX}max"]
    weights = {key: _weight(key, stats, reducers) for key in stats if key not in largest}
    weighted = ranks.sum_over_ranks([stats[key] * weight for key, weight in weights.items()], device)
    totals = ranks.sum_over_ranks(list(weights.values()), device)
    peaks = ranks.max_over_ranks([stats[key] for key in largest], device)
    reduced = dict(zip(largest, peaks, strict=True))
    for key, value, total in zip(weights, weighted, totals, strict=True):
        reduced[key] = value if _is_summed(key, reducers) else value / total if total else 0.0
    return {key: reduced[key] for key in stats}


def _is_summed(key: str, reducers: Mapping[str, Reducer]) -> bool:
    reducer = reducers.get(key)
    plain_sum = reducer is not None and reducer.kind != "mean" and reducer.normalize_by is None
    return key in SUMMED or plain_sum or key == f"{PREFIX}tokens"


def _weight(key: str, stats: Mapping[str, float], reducers: Mapping[str, Reducer]) -> float:
    if _is_summed(key, reducers):
        return 1.0
    reducer = reducers.get(key)
    by_rollouts = key == SAMPLED_REWARD or (reducer is not None and reducer.normalize_by == "rollouts")
    return stats["target_rollouts"] if by_rollouts else stats["num_samples"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
