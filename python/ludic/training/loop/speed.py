"""How much of a device a training step uses: FLOPs and tokens per second and device."""

from __future__ import annotations

from ludic.models.flops import FlopCounter
from ludic.training import ranks
from ludic.training.backend.protocol import with_defaults
from ludic.training.hardware import find_peak_tflops
from ludic.training.loop.state import TrainerState

TRAINING_PHASES = ("forward_backward", "optimizer")
"""The phases of a step whose passes are counted. The first has the passes of the reference, and
those of log-probabilities before the loss, too."""


class Speed:
    """Measures from the start of a step to its end.

    Example: two ranks compute 3e12 and 5e12 FLOPs in 2 s each, on devices with a peak of 4 TFLOPS:
    `perf/tflops` is 8 / 4 = 2, and `perf/mfu` 0.5.
    """

    def __init__(self, run: TrainerState) -> None:
        self._run = run
        self._before = self._total()

    def _counters(self) -> set[FlopCounter]:
        reference: object = self._run.reference
        both = (with_defaults(self._run.backend).flop_counter, getattr(reference, "flops", None))
        return {each for each in both if isinstance(each, FlopCounter)}

    def _total(self) -> float:
        return sum(each.total for each in self._counters())

    def stats(self, *, training_s: float, tokens: float, step_s: float) -> dict[str, float]:
        """`perf/tflops`, `perf/mfu` and `perf/tokens_per_s_per_gpu`, over all ranks; all ranks call
        it. `training_s`: seconds of `TRAINING_PHASES`; `tokens` of the samples of this rank. What
        needs a count or a peak that is unknown is missing."""
        flops, peak = self._total() - self._before, self._peak() or 0.0
        own = [flops, training_s, peak * 1e12 * training_s, float(not peak), tokens, step_s]
        total, seconds, possible, unknown, all_tokens, all_s = ranks.sum_over_ranks(own, self._run.cfg.model_device)
        stats = {"perf/tokens_per_s_per_gpu": all_tokens / all_s} if all_s else {}
        if total and seconds:
            stats["perf/tflops"] = total / seconds / 1e12
            if not unknown:
                stats["perf/mfu"] = total / possible
        return stats

    def _peak(self) -> float | None:
        counter = with_defaults(self._run.backend).flop_counter
        if self._run.cfg.peak_tflops is not None or counter is None or counter.dtype is None:
            return self._run.cfg.peak_tflops
        return find_peak_tflops(self._run.cfg.model_device, counter.dtype)
