"""What a training step measures and logs: its statistics, the seconds of its phases and of each
rank, the time until the end of the run, and the trainer's log-probabilities of some batches."""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ludic.columns import mean_or_zero
from ludic.files.jsonl import append_jsonl, measure_log, truncate_log
from ludic.training import ranks
from ludic.training.backend.protocol import BackwardResult
from ludic.training.batching.mini_batches import PADDING_KEYS, MacroBatch, MiniBatch
from ludic.training.config import TrainerConfig
from ludic.training.info_seed.seed_tags import WITHOUT_PLAIN
from ludic.training.loggers.base import Duration, Percent
from ludic.training.loss.statistics import is_mismatch_sum
from ludic.training.stats import (
    SAMPLED_REWARD,
    Reducer,
    Stat,
    batch_stats,
    combine_micro_stats,
    copy_to_host,
    environment_stats,
    final_values,
    named_reward_stats,
    prefix_keys,
    reduce_over_ranks,
    reducer_stats,
)
from ludic.training.types import SAWBatch
from ludic.types import stored

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
        self._losses: list[Tensor] = []
        self._steps: list[dict[str, float]] = []
        self._micro_stats: list[dict[str, Any]] = []
        self._micro_sizes: list[float] = []
        self._skipped: list[tuple[int, float]] = []
        self._padding = dict.fromkeys(PADDING_KEYS, 0.0)
        self._images: Counter[str] = Counter()
        self._work = self._time_of_ranks = 0.0
        self.rate, self.rate_stats = 1.0, dict[str, float]()
        """Factor by which callbacks scale the learning rate of the batch, 0: it is skipped; and
        their statistics."""

    def add(self, result: BackwardResult, step: dict[str, float] | None, *, at_step_start: bool = True) -> None:
        """Add one optimizer step, or with None a gradient that was dropped. `at_step_start`: its
        log-probabilities belong to the weights at the start of the training step. Only these
        measure the difference between trainer and sampler; later ones include the updates since."""
        self._losses.append(result.loss)
        self._steps += [] if step is None else [step]
        for stats in result.micro_stats:
            self._micro_stats.append({key: stats[key] for key in stats if at_step_start or not is_mismatch_sum(key)})
        self._micro_sizes.extend(result.micro_sizes)
        self._images.update(result.images)

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
        percents = {name for name, reducer in reducers.items() if reducer.as_percent and name not in measured}
        values = {key: Percent(value) if key in percents else value for key, value in final_values(stats).items()}
        times = self.timer.stats()
        computed = self._padding["perf/real_tokens"]
        tokens = computed + self._padding["perf/shared_tokens"]  # of the samples that went through the model
        sharing = {"perf/sharing_factor": tokens / computed} if computed else {}
        speed = {"perf/tokens_per_s": tokens / times["perf/step_s"]} if times["perf/step_s"] else {}
        lockstep = {"ranks/lockstep": self._work / self._time_of_ranks} if self._time_of_ranks else {}
        return {
            **values,
            **self._prepared,
            **self.rate_stats,
            **self._padding,
            **sharing,
            **lockstep,
            **times,
            **speed,
        }

    def _loss_stats(self) -> dict[str, Stat]:
        """Statistics of the passes and the optimizer steps. `loss` and `grad_norm` are means over
        optimizer steps. The losses of ranks add up; the gradient norm is the same on all."""
        whole = {"loss": torch.stack(self._losses).mean()} if self._losses else {}
        *micro_stats, host = copy_to_host([*self._micro_stats, whole])
        # Of a batch that all ranks have, the skipped samples count on rank 0 alone.
        counts_skipped = self.macro.share is None or self.macro.share.rank == 0
        skipped = [(count, tokens) for count, tokens in self._skipped if count and counts_skipped]
        skipped_stats = [_zero_weight_stats(micro_stats, tokens / count) for count, tokens in skipped]
        sizes = [*self._micro_sizes, *(count for count, _ in skipped)]
        steps = {
            "loss": Stat(host.get("loss", 0.0), rule="sum"),
            "grad_norm": Stat(mean_or_zero([step["grad_norm"] for step in self._steps if not step.get("skipped_steps")])),
            "optimizer_steps": Stat(float(len(self._steps))),
        }
        if self._steps:
            steps["lr"] = Stat(self._steps[-1]["lr"])
            if "loss_scale" in self._steps[-1]:
                steps["loss_scale"] = Stat(self._steps[-1]["loss_scale"])
                steps["skipped_steps"] = Stat(sum(step["skipped_steps"] for step in self._steps))
        images = {key: Stat(value, rule="max" if key.endswith("_s") else "sum") for key, value in self._images.items()}
        return {**combine_micro_stats([*micro_stats, *skipped_stats], sizes), **steps, **images}

    def _rollout_stats(self) -> dict[str, Stat]:
        """Statistics of the batch: its rollouts, and what was dropped."""
        meta = self.batch.meta
        counts = {**self.macro.counts(), "zero_weight_skipped": float(sum(count for count, _ in self._skipped))}
        counts |= {key: float(meta[key]) for key in ("played_rollouts", WITHOUT_PLAIN, *EPISODE_KEYS) if key in meta}
        stats = {**{key: Stat(value, rule="sum") for key, value in counts.items()}, **environment_stats(meta)}
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


def combine_result(result: BackwardResult, device: torch.device | str) -> dict[str, float]:
    """The statistics of a mini-batch over all ranks, with prefixed keys."""
    combined = combine_micro_stats(copy_to_host(result.micro_stats), result.micro_sizes)
    return prefix_keys(final_values(reduce_over_ranks(combined, device)))


def _zero_weight_stats(micro_stats: Sequence[Mapping[str, float]], tokens: float) -> dict[str, float]:
    """Statistics of samples of weight 0, which need no forward pass, for the keys that the loss
    reports. `tokens`: action tokens per sample."""
    values = {"adv_mean": 0.0, "adv_std": 0.0, "avg_action_tokens": tokens}
    reported = {key for stats in micro_stats for key in stats}
    return {key: values[name] for key in reported if (name := key.rpartition("/")[2]) in values}


@cache
def _warn_of_name(name: str) -> None:
    logger.warning("the reducer %s has the name of a statistic of the loss, which is logged instead; give it another name", name)


class PhaseTimer:
    """Adds up wall time under names.

    >>> timer = PhaseTimer()
    >>> with timer.phase("rollout"):
    ...     batch = await source.next_batch()
    >>> timer.stats()
    {'perf/rollout_s': 1.2, 'perf/step_s': 1.3}
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        """`seconds`: the totals to add to, such as the totals of a resumed run."""
        self._started = time.perf_counter()
        self._seconds = {} if seconds is None else seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with record_function(f"ludic.{name}"):
                yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self, name: str) -> float:
        """Seconds of one phase so far."""
        return self._seconds.get(name, 0.0)

    def stats(self) -> dict[str, float]:
        """`perf/<phase>_s` of each phase, and `perf/step_s` since the timer was created."""
        whole = time.perf_counter() - self._started
        return {**{f"perf/{name}_s": seconds for name, seconds in self._seconds.items()}, "perf/step_s": whole}


class TimeLeft:
    """Estimates the seconds until the last step from the wall time of the latest steps, with the
    evaluations and checkpoints between them.

    Example: steps 10 to 30 took 40 s, and step 100 is the last: 70 * 40 / 20 = 140 s.
    """

    WINDOW = 20
    """Number of earlier calls that the estimate reaches back to."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: int | None = None
        self._marks: deque[tuple[int, float]] = deque(maxlen=self.WINDOW + 1)

    def begin(self, step: int, last: int | None) -> None:
        """Called at `step`, before the next one. `last`: number of the last step. None if it is not
        known."""
        self._last = last
        self._marks.clear()
        self._marks.append((step, self._clock()))

    def after(self, step: int) -> Duration | None:
        """The estimate after `step`; None if the last step is unknown."""
        if self._last is None or not self._marks:
            return None
        self._marks.append((step, self._clock()))
        (first, began), (_, now) = self._marks[0], self._marks[-1]
        return Duration(max(0, self._last - step) * (now - began) / (step - first)) if step > first else None


SLOW, STEPS_IN_A_ROW = 1.5, 5
"""A rank is named in a warning if it takes this multiple of the median for this number of steps."""


class RankTimes:
    """Compares the seconds that the ranks compute in each step.

    Without a wrapper a rank computes alone until the gradients are summed. The forward and backward
    passes of a wrapped model exchange tensors, so that all ranks appear equally slow.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._last_slow: int | None = None

    def compare(self, seconds: float, device: torch.device | str) -> dict[str, float]:
        """`ranks/wait_s` and `ranks/slowest`, from the seconds of this rank; empty with one rank.
        All ranks call it: one exchange of a number."""
        if not ranks.is_distributed():
            return {}
        own = [0.0] * ranks.world_size()
        own[ranks.rank()] = seconds
        everyone = ranks.max_over_ranks(own, device)
        slow = find_slow(everyone)
        self._in_a_row = self._in_a_row + 1 if slow is not None and slow == self._last_slow else int(slow is not None)
        self._last_slow = slow
        if self._in_a_row == STEPS_IN_A_ROW and slow == ranks.rank():
            logger.error(
                "rank %d, on %s, has taken %.1f times as long as the median of the ranks for %d steps: all wait for it",
                slow,
                socket.gethostname(),
                everyone[slow] / statistics.median(everyone),
                STEPS_IN_A_ROW,
            )
        return describe_wait(everyone)


def describe_wait(seconds: Sequence[float]) -> dict[str, float]:
    """The mean over ranks of the time that a rank waits for the slowest, and the number of that.

    Example: [1.0, 3.0] seconds: rank 0 waits 2 s and rank 1 none, so `wait_s` is 1, `slowest` 1.
    """
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return {"ranks/wait_s": seconds[slowest] - statistics.fmean(seconds), "ranks/slowest": float(slowest)}


def find_slow(seconds: Sequence[float]) -> int | None:
    """The slowest rank, if it took more than `SLOW` times the median.

    Example: of two ranks, [1.0, 4.0] has the median 2.5 and names rank 1.
    """
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return slowest if seconds[slowest] > SLOW * statistics.median(seconds) > 0 else None


DIGITS = 4
"""Decimal places of a log-probability."""


class TokenLog:
    """Appends a line for each sample of every `every`-th batch: `id` (the id of its rollout),
    `step` (its index in the rollout), `logps` (one for each sampled token that is trained on, with
    the weights that the training step begins with; null for one that is not finite) and `skipped`,
    the number of sampled tokens before these. They cost a forward pass over such a batch."""

    def __init__(self, path: Path, every: int) -> None:
        """`every`: batch 0 and every `every`-th after it. 0 means none."""
        self._path, self._every = path, every

    def is_due(self, number: int) -> bool:
        """Whether batch `number`, the first of which is 0, is logged. Batches are counted as their
        source does, so that these are the batches of the log of rollouts; one without samples to
        train on has no training step."""
        return self._every > 0 and number % self._every == 0

    def state_dict(self) -> dict[str, int]:
        """The size of the file."""
        return {"bytes": measure_log(self._path)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Remove what was logged after `state`: those batches are trained again."""
        truncate_log(self._path, int(state["bytes"]))

    def write(self, macro: MacroBatch, logps: Mapping[int, Tensor]) -> None:
        """`logps`: row -> [A] of its action tokens. A first token, which has no prediction, is no
        part of them. Rows of samples that no rollout of the log has are left out."""
        rows = [row for row in sorted(logps) if "rollout_id" in macro.items[row].meta]
        values = torch.cat([logps[row] for row in rows]).double().cpu() if rows else torch.zeros(0)
        lines = []
        for row, own in zip(rows, values.split([len(logps[row]) for row in rows]), strict=True):
            item = macro.items[row]
            lines.append(
                {
                    "id": item.meta["rollout_id"],
                    "step": item.meta.get("step_index", 0),
                    "skipped": int(stored(item, "action_mask")[0] == 1),
                    "logps": [round(value, DIGITS) for value in own.tolist()],
                }
            )
        append_jsonl(self._path, lines)
