"""The measurements of one training step, and the statistics that it logs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ludic.training.averages import mean_or_zero
from ludic.training.backend.protocol import BackwardResult
from ludic.training.batching.mini_batches import PADDING_KEYS, MacroBatch, MiniBatch
from ludic.training.config import TrainerConfig
from ludic.training.info_seed.seed_tags import WITHOUT_PLAIN
from ludic.training.loop.micro_stats import Stat, combine_micro_stats, copy_to_host, final_values, reduce_over_ranks
from ludic.training.loop.timings import PhaseTimer
from ludic.training.loss.mismatch import is_mismatch_sum
from ludic.training.stats import SAMPLED_REWARD, Reducer, batch_stats, mark_percents, named_reward_stats, reducer_stats
from ludic.training.types import SAWBatch

logger = logging.getLogger(__name__)

EPISODE_KEYS = ("num_retried_episodes", "num_failed_episodes", "num_cancelled_episodes", "num_dropped_groups")
"""The rollout engine's counts of episodes that went wrong."""


class StepRecord:
    """Collects results while a step runs. Tensors stay on the device until `stats` copies them
    together."""

    def __init__(
        self, batch: SAWBatch, macro: MacroBatch, timer: PhaseTimer, prepared: Mapping[str, float] | None = None
    ) -> None:
        """`prepared`: statistics of the preparation, which are already over all ranks."""
        self.batch, self.macro, self.timer = batch, macro, timer
        self._prepared = {} if prepared is None else prepared
        self._losses: list[torch.Tensor] = []
        self._steps: list[dict[str, float]] = []
        self._micro_stats: list[dict[str, Any]] = []
        self._micro_sizes: list[float] = []
        self._skipped: list[tuple[int, float]] = []
        self._padding = dict.fromkeys(PADDING_KEYS, 0.0)
        self._work = self._time_of_ranks = 0.0

    def add(self, result: BackwardResult, step: dict[str, float], *, at_step_start: bool = True) -> None:
        """Add one optimizer step. `at_step_start`: its log-probabilities belong to the weights at
        the start of the training step. Only these measure the difference between trainer and
        sampler; later ones include the updates since."""
        self._losses.append(result.loss)
        self._steps.append(step)
        self._micro_stats.extend(stats if at_step_start else _without_mismatch(stats) for stats in result.micro_stats)
        self._micro_sizes.extend(result.micro_sizes)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps so far."""
        return len(self._steps)

    def add_padding(self, mini_batch: MiniBatch) -> None:
        """Add its token counts and its skipped samples. Collation ran between the passes, and is
        counted as batching."""
        for key, value in mini_batch.padding().items():
            self._padding[key] += value
        self._skipped.append((mini_batch.num_skipped, mini_batch.skipped_tokens))
        work, time_of_ranks = mini_batch.lockstep()
        self._work, self._time_of_ranks = self._work + work, self._time_of_ranks + time_of_ranks
        self.timer.add("batching", mini_batch.collate_s)
        self.timer.add("forward_backward", -mini_batch.collate_s)

    def stats(self, reducers: Mapping[str, Reducer], cfg: TrainerConfig, *, of_all_ranks: bool = False) -> dict[str, float]:
        """All statistics of the step, by the keys of docs/metrics.md without their prefix. A
        statistic that was not measured has no key. `of_all_ranks`: reduce them over ranks whatever
        `cfg` says.

        Of a batch that all ranks have, each knows all samples and has run only some: just the
        statistics of the passes are reduced."""
        shared = self.macro.share is not None
        passes = reduce_over_ranks(self._loss_stats(), cfg.model_device) if shared else self._loss_stats()
        everyone = [*self.batch.items, *self.macro.dropped]
        measured = {**passes, **batch_stats([self.batch]), **named_reward_stats(everyone), **self._rollout_stats()}
        reduced = reducer_stats(everyone, reducers, int(measured["target_rollouts"].value))
        for name in measured.keys() & reduced.keys():
            _warn_of_name(name)
        stats = {**reduced, **measured}
        if (cfg.reduce_stats_across_ranks or of_all_ranks) and not shared:
            stats = reduce_over_ranks(stats, cfg.model_device)
        percents = {name: reducer for name, reducer in reducers.items() if name not in measured}
        times = self.timer.stats()
        speed = {"perf/tokens_per_s": self._sample_tokens / times["perf/step_s"]} if times["perf/step_s"] else {}
        lockstep = {"ranks/lockstep": self._work / self._time_of_ranks} if self._time_of_ranks else {}
        return {
            **mark_percents(final_values(stats), percents),
            **self._prepared,
            **self._padding,
            **self._sharing(),
            **lockstep,
            **times,
            **speed,
        }

    @property
    def _sample_tokens(self) -> float:
        """Tokens of the samples that went through the model, shared or not."""
        return self._padding["perf/real_tokens"] + self._padding["perf/shared_tokens"]

    def _sharing(self) -> dict[str, float]:
        computed = self._padding["perf/real_tokens"]
        return {"perf/sharing_factor": self._sample_tokens / computed} if computed else {}

    def _loss_stats(self) -> dict[str, Stat]:
        """Statistics of the passes and the optimizer steps. `loss` and `grad_norm` are means over
        optimizer steps. The losses of ranks add up; the gradient norm is the same on all."""
        whole = {"loss": torch.stack(self._losses).mean()} if self._losses else {}
        *micro_stats, host = copy_to_host([*self._micro_stats, whole])
        skipped = [(count, tokens) for count, tokens in self._skipped if count and self._counts_skipped]
        skipped_stats = [_zero_weight_stats(micro_stats, tokens / count) for count, tokens in skipped]
        sizes = [*self._micro_sizes, *(count for count, _ in skipped)]
        steps = {
            "loss": Stat(host.get("loss", 0.0), rule="sum"),
            "grad_norm": Stat(mean_or_zero([step["grad_norm"] for step in self._steps])),
            "optimizer_steps": Stat(float(len(self._steps))),
        }
        if self._steps:
            steps["lr"] = Stat(self._steps[-1]["lr"])
        return {**combine_micro_stats([*micro_stats, *skipped_stats], sizes), **steps}

    @property
    def _counts_skipped(self) -> bool:
        """Whether the statistics of the passes include the skipped samples: of a batch that all
        ranks have, on rank 0 alone."""
        return self.macro.share is None or self.macro.share.rank == 0

    def _rollout_stats(self) -> dict[str, Stat]:
        """Statistics of the batch: its rollouts, and what was dropped."""
        meta = self.batch.meta
        counts = {**self.macro.counts(), "zero_weight_skipped": float(sum(count for count, _ in self._skipped))}
        counts |= {key: float(meta[key]) for key in ("played_rollouts", WITHOUT_PLAIN, *EPISODE_KEYS) if key in meta}
        stats = {key: Stat(value, rule="sum") for key, value in counts.items()}
        rollouts = float(meta.get("played_rollouts", meta.get("target_rollouts", len(self.batch.items))))
        stats |= {key: Stat(float(meta[key]), rollouts) for key in ("zvp_filter_frac", "frac_reward_zero_std") if key in meta}
        if "avg_total_reward" in meta:
            mean = float(meta["avg_total_reward"])
            stats[SAMPLED_REWARD] = Stat(mean, rollouts)
            if "reward_std" in meta:
                stats["reward_std"] = Stat(float(meta["reward_std"]), rollouts, "std", mean)
        for key, name in (("generation_s", "perf/generation_s"), ("policy_lag", "policy_lag")):
            if key in meta:
                stats[name] = Stat(float(meta[key]), float(len(self.batch.items)))
        stats |= {
            key: Stat(float(value), rule="max") for key, value in meta.items() if key.startswith(("queue/", "actors/", "groups/"))
        }
        lengths = [item.meta["completion_length"] for item in self.batch.items if "completion_length" in item.meta]
        if lengths:
            stats["min_completion_length"] = Stat(float(min(lengths)), rule="min")
            stats["max_completion_length"] = Stat(float(max(lengths)), rule="max")
        return stats


def _zero_weight_stats(micro_stats: Sequence[Mapping[str, float]], tokens: float) -> dict[str, float]:
    """Statistics of samples of weight 0, which need no forward pass, for the keys that the loss
    reports. `tokens`: action tokens per sample."""
    values = {"adv_mean": 0.0, "adv_std": 0.0, "avg_action_tokens": tokens}
    reported = {key for stats in micro_stats for key in stats}
    return {key: values[name] for key in reported if (name := key.rpartition("/")[2]) in values}


@cache
def _warn_of_name(name: str) -> None:
    """Warn, once per process."""
    logger.warning("the reducer %s has the name of a statistic of the loss, which is logged instead; give it another name", name)


def _without_mismatch(stats: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stats.items() if not is_mismatch_sum(key)}
