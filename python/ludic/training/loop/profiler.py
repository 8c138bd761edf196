"""A trace of some training steps, for Perfetto (https://ui.perfetto.dev): the operations of the CPU
and of the GPU, under the names of the phases of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ludic.errors import ConfigError
from ludic.training import ranks

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
        if not 1 <= first <= last:
            raise ConfigError(
                f"first ({first}) and last ({last}) must be steps with 1 <= first <= last; step 1 is the first of a run"
            )
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
