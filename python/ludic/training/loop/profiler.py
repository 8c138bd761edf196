"""How fast a training step is: its FLOPs and tokens per second and device, and traces of chosen
steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ludic.errors import check_value
from ludic.models.flops import FlopCounter
from ludic.training import ranks
from ludic.training.backend.protocol import with_defaults
from ludic.training.loop.state import TrainerState

logger = logging.getLogger(__name__)


class Profiler:
    """Records the steps of a range, one file for each rank:
    `folder/step_10-12.rank0.json.gz`.

    A run that is resumed inside the range records the steps that are left; one that ends, fails or
    is stopped inside it writes what it has. The numbers of the file's name are the steps recorded.
    Only operations of the thread that trains, and of its backward passes, are recorded, and all of
    the GPU. Recorded steps take longer, and their results are the same.

    >>> trainer = Trainer(..., profiler=Profiler(10, 12, folder="runs/a/profile"))
    """

    def __init__(self, first: int, last: int, *, folder: str | Path, note: Callable[[str], object] = logger.warning) -> None:
        """`first` and `last` step, both recorded; 1 is the first of a run. `note` receives where
        the file is, and that no step was recorded."""
        check_value("first", first, "step 1 is the first of a run", least=1)
        check_value("last", last, "the last step is not before the first", least=first)
        self.first, self.last = first, last
        self.folder, self._note = Path(folder), note
        self.files: list[Path] = []
        """What this rank has written."""
        self._running: profile | None = None
        self._recorded: list[int] = []

    def check_range(self, step: int, last: int | None) -> None:
        """Warn if no step after `step`, up to `last`, is in the range. None means no known end."""
        if self.files or (step < self.last and (last is None or self.first <= last)):
            return
        until = "" if last is None else f" to {last}"
        self._note(
            f"no step is profiled: {self.first}-{self.last} are not among the steps from {step + 1}{until} that this run takes; "
            "choose some of these (in a recipe profile.steps)"
        )

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Records the block, which takes step `number`, if it is in the range. After the last step
        of the range, or an error, the trace is written."""
        if not self.first <= number <= self.last:
            yield
            return
        if self._running is None:
            self._start()
        try:
            yield
            self._recorded.append(number)
        except BaseException:
            self.close()
            raise
        if number == self.last:
            self.close()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        running = profile(activities=activities)
        running.start()
        self._running, self._recorded = running, []

    def close(self) -> None:
        """End a recording, if there is one, and write its steps. A trace that cannot be written is
        reported, and the run goes on."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            running.stop()
            if not self._recorded:
                return
            first, last = self._recorded[0], self._recorded[-1]
            steps = str(first) if first == last else f"{first}-{last}"
            path = self.folder / f"step_{steps}.rank{ranks.rank()}.json.gz"
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                running.export_chrome_trace(str(path))
            except BaseException:
                with suppress(OSError):
                    path.unlink()
                raise
        except Exception:
            logger.exception("the trace of the steps %s could not be written; training goes on", self._recorded)
            return
        self.files.append(path)
        self._note(f"the trace of step {steps} is in {path}; open it at https://ui.perfetto.dev")


TRAINING_PHASES = ("forward_backward", "optimizer")
"""The phases of a step whose passes are counted. The first includes the passes of the reference and
of log-probabilities before the loss."""


class Speed:
    """Measures from the start of a step to its end.

    Example: two ranks compute 3e12 and 5e12 FLOPs in 2 s each, on devices with a peak of 4 TFLOPS:
    `perf/tflops` is 8 / 4 = 2, and `perf/mfu` 0.5.
    """

    def __init__(self, run: TrainerState) -> None:
        self._run = run
        self._before = self._total()

    def _total(self) -> float:
        critic = None if self._run.critic is None else self._run.critic.backend.flops
        all_ = (with_defaults(self._run.backend).flops, getattr(self._run.reference, "flops", None), critic)
        return sum(counter.total for counter in {each for each in all_ if isinstance(each, FlopCounter)})

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
        counter = with_defaults(self._run.backend).flops
        if self._run.cfg.peak_tflops is not None or counter is None or counter.dtype is None:
            return self._run.cfg.peak_tflops
        return find_peak_tflops(self._run.cfg.model_device, counter.dtype)


PEAK_TFLOPS: dict[str, tuple[float, float, float]] = {
    "GB200": (2500, 1250, 80),
    "B200": (2250, 1125, 75),
    "H200": (989.4, 494.7, 67),
    "H100 PCIe": (756, 378, 51),
    "H100": (989.4, 494.7, 67),
    "A100": (312, 156, 19.5),
    "A10": (125, 62.5, 31.2),
    "L40S": (362.05, 183, 91.6),
    "L4": (121, 60, 30.3),
    "RTX 4090": (165.2, 82.6, 82.6),
    "MI300X": (1307.4, 653.7, 163.4),
}
"""Peaks of a device in 10^12 FLOPs per second without sparsity, by words of its name: of bfloat16
and float16, of TF32, and of float32. From the data sheets and architecture papers of NVIDIA and
AMD, which give most peaks with sparsity: twice as much. GeForce: with float32 sums."""
OTHER_CHIPS = frozenset({"MIG", "NVL", "Laptop", "Max-Q", "D"})
"""Words in the names of slower variants, and of parts of a GPU, whose peaks are not known here."""


def find_peak_tflops(device: torch.device | str, dtype: torch.dtype) -> float | None:
    """The peak of a device that computes in `dtype`, in 10^12 FLOPs per second; None if it is not
    in `PEAK_TFLOPS`. Float32 is TF32 where torch may round products to that."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype, tf32=torch.get_float32_matmul_precision() != "highest")


def peak_of(name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """`find_peak_tflops` of a device of this name, such as `NVIDIA A100-SXM4-80GB`."""
    words = {*name.split(), *(word.partition("-")[0] for word in name.split())}
    found = [peaks for chip, peaks in PEAK_TFLOPS.items() if words >= set(chip.split())]
    if not found or words & OTHER_CHIPS or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    half, rounded, single = found[0]
    return half if dtype != torch.float32 else rounded if tf32 else single
