"""The folder of one run: what lies where, and the progress that lets an interrupted run go on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from ludic.errors import CheckpointError
from ludic.recipes.compose import to_yaml

DONE = "done"
"""The phase of a run that is at its end."""


@dataclass
class Progress:
    """How far a run has come. Written whenever a phase ends or the run is interrupted."""

    phase: str = "warm_up"
    """The phase to go on with: of `ludic train` warm_up or reinforce, of `ludic sft` sft, of `ludic train-rm` rm; done at the end."""
    command: str = "train"
    """Of `ludic`: what made the folder and can go on with it."""
    before: dict[str, Any] | None = None
    """The evaluation before reinforcement, with sampled answers."""
    after: dict[str, Any] | None = None
    """The same after it."""
    steps: int = 0
    """Batches of reinforcement that are done."""
    preflight: dict[str, Any] | None = None
    """How far trainer and sampler were apart before the first step; null where they were not compared."""
    early_stopping: dict[str, Any] | None = None
    """Of a run with a patience: `stopped` early or not, the step whose weights were kept, by which metric, and its value."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of set-up, warm-up, reinforcement and evaluation so far, and of the whole (`wall`)."""


class RunDirectory:
    """Paths and small files of `output/name`."""

    command: ClassVar[str] = "train"
    """Of `ludic`: what makes such folders."""
    first_phase: ClassVar[str] = "warm_up"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.summary = path / "summary.json"
        self.picture = path / "reward.png"
        self.model = path / "model"
        self.base, self.adapter = path / "base", path / "adapter"  # of a run with LoRA
        self.checkpoints = path / "checkpoints"
        self.server_log = path / "server.log"
        self._progress = path / "progress.json"

    @classmethod
    def begin(cls, recipe: Any, otherwise: str) -> Self:
        """A new folder with the recipe in it, named as the recipe says; `otherwise` names it where that has no name."""
        directory = cls(new_folder(recipe.output, recipe.name, otherwise))
        write_text(directory.config, to_yaml(recipe))
        directory.write_progress(Progress(phase=cls.first_phase, command=cls.command))
        return directory

    @classmethod
    def go_on(cls, path: Path) -> Self:
        """The folder of an interrupted run, whose recipe is in `config`. Raises CheckpointError where another command made it."""
        directory = cls(path)
        if not directory.config.is_file() or not directory._progress.is_file():
            raise CheckpointError(f"{path} is not the folder of a run: it has no config.yaml and progress.json")
        made_by = directory.read_progress().command
        if made_by != cls.command:
            raise CheckpointError(
                f"{path} is the folder of a run of `ludic {made_by}`; go on with `ludic {made_by} --resume {path}`"
            )
        return directory

    def read_progress(self) -> Progress:
        return Progress(**json.loads(self._progress.read_text(encoding="utf-8")))

    def write_progress(self, progress: Progress) -> None:
        write_text(self._progress, json.dumps(asdict(progress), indent=2) + "\n")

    def read_metrics(self, phase: str) -> list[dict[str, Any]]:
        """The lines of one phase in metrics.jsonl, one a step; of a step that was run twice the last counts. What a full disk or a loss of
        power tore off is left out."""
        if not self.metrics.is_file():
            return []
        by_step: dict[int, dict[str, Any]] = {}
        for line in map(_whole, self.metrics.read_text(encoding="utf-8").splitlines()):
            if line.get("phase") == phase:
                by_step.setdefault(line["step"], {}).update(line)  # a step that was evaluated has two lines
        return [by_step[step] for step in sorted(by_step)]

    def cut_metrics(self, phase: str, step: int, *, evaluated: bool) -> int:
        """Take lines of the phase after `step` out of metrics.jsonl, and what was torn off. How many steps are to be done again.

        `evaluated`: an evaluation of `step` counts, and its line stays.
        """
        if not self.metrics.is_file():
            return 0
        lines = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [text for text in lines if (line := _whole(text)) and _stands(line, phase, step, evaluated)]
        if kept != lines:
            write_text(self.metrics, "".join(kept))
        return len({line["step"] for line in map(_whole, lines) if line.get("phase") == phase and line["step"] > step})


def _stands(line: Mapping[str, Any], phase: str, step: int, evaluated: bool) -> bool:
    if line.get("phase") != phase or line["step"] < step:
        return True
    only_measured = not any(key.startswith("train/") for key in line)
    return bool(line["step"] == step and (evaluated or not only_measured))


def _whole(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class SFTDirectory(RunDirectory):
    """The folder of a supervised run."""

    command, first_phase = "sft", "sft"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.picture = path / "loss.png"
        self.demonstrations = path / "data.jsonl"


class RMDirectory(RunDirectory):
    """The folder of a reward-model run."""

    command, first_phase = "train-rm", "rm"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.picture = path / "training.png"
        self.reliability = path / "reliability.png"
        self.margins = path / "margins.png"
        self.pairs = path / "data.jsonl"
        self.heldout_pairs = path / "heldout.jsonl"


def new_folder(output: str, name: str | None, otherwise: str, *, resumes: bool = True) -> Path:
    """`output/name`, made. `otherwise` names it where no name was asked for; where that is taken, with the time behind it, and where that
    is taken too, with a number behind the time. `resumes`: whether a folder that is there could be gone on with."""
    path = Path(output).expanduser() / (name or otherwise)
    for candidate in [path] if name is not None else _candidates(path):
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            continue
    remedy = f", or go on with --resume {path}" if resumes else ""
    raise CheckpointError(f"{path} is there already; choose another name={remedy}")


def _candidates(path: Path) -> Iterator[Path]:
    yield path
    later = path.with_name(f"{path.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    yield later
    yield from (later.with_name(f"{later.name}-{number}") for number in range(2, 1000))


def write_text(path: Path, text: str) -> None:
    """Whole or not at all: written aside, then renamed."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
