"""The folder of one run: the paths in it, and the progress from which an interrupted run is
resumed."""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from ludic import __version__
from ludic.distribution import find_version
from ludic.errors import CheckpointError, ConfigError
from ludic.files.atomic import clear_unfinished_files, write_text
from ludic.files.manifest import describe_files, find_changes, read_hashed_json, write_hashed_json
from ludic.recipes.compose import compose, to_plain_values, to_yaml
from ludic.recipes.epochs_schema import compose_dpo, compose_rm, compose_sft, list_data_files
from ludic.recipes.named_sources import FROZEN_MODELS, list_local_sources, list_read_files, list_read_models
from ludic.runs.lock import RunLock

logger = logging.getLogger(__name__)

DONE = "done"
"""The phase of a run that is finished."""
FOLLOW_S = 30.0
"""How long a shared file system may take to show a new folder to other machines."""


@dataclass
class Progress:
    """How far a run has come: the content of progress.json, written when a phase ends and when
    the run is interrupted."""

    phase: str = "warm_up"
    """The phase to resume with: warm_up or reinforce for `ludic train`, sft for `ludic sft`, rm
    for `ludic train-rm`, warm_up or dpo for `ludic dpo`; done at the end."""
    command: str = "train"
    """The command of `ludic` that made the folder and can resume it."""
    before: dict[str, Any] | None = None
    """The evaluation before training, with sampled answers."""
    after: dict[str, Any] | None = None
    """The evaluation after training."""
    steps: int = 0
    """Training steps that are done; the warm-up is not counted."""
    schedule_steps: int | None = None
    """Of a run that was given more steps, those that its decaying learning rate was begun with and
    keeps; null: as many as the run has."""
    preflight: dict[str, Any] | None = None
    """The difference between trainer and sampler before the first step; null if they were not
    compared."""
    early_stopping: dict[str, Any] | None = None
    """With early stopping: whether it `stopped` the run, the step whose weights were kept, the
    metric and its best value."""
    stopped_by: dict[str, Any] | None = None
    """If a callback ended the run: its name (`callback`), the `reason`, the `step`, and the number
    of steps of the recipe (`of_steps`)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds of each phase so far, and of the whole run (`wall`)."""
    recipe: dict[str, Any] | None = None
    """The settings that the run was started with; null in the folder of an older version."""
    versions: dict[str, str] | None = None
    """Versions of the libraries when it was started."""
    local_sources: list[str] = field(default_factory=list)
    """The data and models of the recipe that were files or folders then, and thus no ids of the
    hub."""
    model_files: dict[str, dict[str, list[dict[str, Any]]]] | None = None
    """Size and hash of each file of the models and the chat template that the recipe names, by
    their folders; null in the folder of an older version."""
    images: dict[str, str | None] | None = None
    """Of a model that sees images, the digest of its `processor`, null if it has none; null of one
    that reads text alone."""
    failed: str | None = None
    """The error that ended the last attempt; null while it runs, after a stop, and at the end."""


class RunDirectory:
    """Paths and small files of `output/name`."""

    command: ClassVar[str] = "train"
    """The command of `ludic` that makes such folders."""
    run_class: ClassVar[str] = "ludic.runs.reinforce:RLRun"
    """The class of its runs, as `module:name`: the import loads torch."""
    compose: ClassVar[Callable[[Sequence[str]], Any]] = staticmethod(compose)
    """Returns the recipe of a command line."""
    first_phase: ClassVar[str] = "warm_up"
    last_phase: ClassVar[str] = "reinforce"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.token_logps = path / "token_logps.jsonl"  # of its tokens, by the trainer
        self.failed_episodes = path / "failed_episodes.jsonl"
        self.summary = path / "summary.json"
        self.picture = path / "reward.png"
        self.model = path / "model"
        self.base, self.adapter = path / "base", path / "adapter"  # with LoRA only
        self.reference = path / "reference"  # with a reference only: the policy that reinforcement began with
        self.seed_heatmaps = path / "seed_heatmaps"  # with InfoSeed only
        self.checkpoints = path / "checkpoints"
        self.images = path / "images"  # that the run has seen, by their digest
        self.server_log = path / "server.log"
        self.ranks = path / "ranks"  # with several ranks only: the output of those that do not lead
        self.policy = path / "policy"  # with actors only: what they sample with
        self.servers = path / "servers"  # with place.servers only: their addresses
        self.profile = path / "profile"  # with profile.steps only
        self.pushed = path / "pushed"  # weights that servers read
        self._progress = path / "progress.json"
        self._lock: RunLock | None = None
        self.is_follower = False
        """Whether another process writes the folder, and this one nothing in it."""

    @classmethod
    def default_name(cls, recipe: Any) -> str:
        """The name of a run whose recipe has none."""
        return f"{recipe.recipe}-{recipe.algorithm.rpartition(':')[2]}-seed{recipe.seed}"

    @classmethod
    def begin(cls, recipe: Any) -> Self:
        """Make a folder with the recipe in it.

        The folder appears with all of its files, and is locked until `release`."""
        place = run_path(recipe.output, recipe.name, cls.default_name(recipe))
        aside = place.with_name(f".unfinished_{place.name}.{os.getpid()}")
        make_folder(aside)
        lock, unfinished = RunLock(aside), cls(aside)
        try:
            write_text(unfinished.config, to_yaml(recipe))
            unfinished.write_progress(
                Progress(
                    cls.first_phase,
                    cls.command,
                    recipe=to_plain_values(recipe),
                    versions=collect_versions(),
                    local_sources=list_local_sources(recipe),
                    model_files={
                        folder: describe_files(Path(folder), names) for folder, names in list_read_files(recipe).items()
                    },
                )
            )
            directory = cls(_move_to_free_name(aside, place, is_chosen=recipe.name is not None))
        except BaseException:
            lock.release()
            shutil.rmtree(aside, ignore_errors=True)
            raise
        directory._lock = lock
        return directory

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Open the folder of an interrupted run and lock it until `release`. Raises
        CheckpointError if another command made it or another process uses it."""
        directory = cls.open_to_read(path)
        directory._lock = RunLock(path)
        for folder in (path, directory.model, directory.adapter):
            clear_unfinished_files(folder)
        return directory

    @classmethod
    def open_to_read(cls, path: Path) -> Self:
        """Open the folder of a run to read it, without a lock. Raises CheckpointError if another
        command made it."""
        directory = cls(path)
        check_is_run(path)
        made_by = directory.read_progress().command
        if made_by != cls.command:
            raise CheckpointError(f"{path} is a run of `ludic {made_by}`; resume it with `ludic {made_by} --resume {path}`")
        return directory

    @classmethod
    def follow(cls, path: Path) -> Self:
        """Open the folder that rank 0 has made or resumed, on another rank: without a lock, and
        nothing in it is changed."""
        appears_by = time.monotonic() + FOLLOW_S
        while not (path / "progress.json").is_file():
            if time.monotonic() > appears_by:
                raise CheckpointError(f"{path} of rank 0 is not on {socket.gethostname()}; set output=FOLDER on a shared disk")
            time.sleep(0.1)
        directory = cls.open_to_read(path)
        directory.is_follower = True
        return directory

    def release(self) -> None:
        """Unlock the folder, so that another process can resume the run."""
        if self._lock is not None:
            self._lock.release()

    @property
    def has_all_weights(self) -> bool:
        """Whether a checkpoint has all that was read of the weights of `model`."""
        return any(self.checkpoints.glob("step_*")) or any((self.checkpoints / self.last_phase).glob("step_*"))

    @property
    def has_steps(self) -> bool:
        """Whether any step was logged."""
        return self.metrics.is_file() and self.metrics.stat().st_size > 0

    def read_progress(self) -> Progress:
        try:
            return Progress(**read_hashed_json(self._progress, since="model_files"))
        except (CheckpointError, TypeError) as error:
            raise CheckpointError(
                f"{self._progress} is damaged ({error}); begin a new run: `ludic {self.command} {self.config} name=NAME`"
            ) from error

    def check_models(self, recipe: Any) -> None:
        """Raise CheckpointError if a model or the chat template that the run reads is another one
        than when it began. The weights of `model` may change if a checkpoint has all of them."""
        now, known, frozen = list_read_files(recipe), self.read_progress().model_files, list_read_models(recipe, FROZEN_MODELS)
        if known is None:
            if now:
                logger.warning("%s: an older version began the run, and %s cannot be verified", self.path, ", ".join(now))
            return
        has_all = not recipe.lora.rank and self.has_all_weights
        for folder in {**known, **now}:
            files = known.get(folder, {})
            unread = (".safetensors", ".safetensors.index.json") if has_all and folder not in frozen else ()
            faults = find_changes(Path(folder), {name: files[name] for name in files if not name.endswith(unread)})
            faults += [
                f"{name} was added later" for name in now.get(folder, ()) if name not in files and not name.endswith(unread)
            ]
            if faults:
                raise CheckpointError(f"the folder {folder} has changed since the run began: {', '.join(faults)}; put it back")

    def write_progress(self, progress: Progress) -> None:
        if not self.is_follower:
            write_hashed_json(self._progress, asdict(progress))

    def read_metrics(self, phase: str) -> list[dict[str, Any]]:
        """The records of one phase in metrics.jsonl, one per step; the last one of a step that was
        run twice. Incomplete lines, left by a full disk or a power failure, are skipped."""
        if not self.metrics.is_file():
            return []
        by_step: dict[int, dict[str, Any]] = {}
        for line in map(_parse_line, self.metrics.read_text(encoding="utf-8").splitlines()):
            if line.get("phase") == phase:
                by_step.setdefault(line["step"], {}).update(line)  # a step that was evaluated has two lines
        return [by_step[step] for step in sorted(by_step)]

    def read_steps(self, phase: str) -> list[dict[str, Any]]:
        """The metrics of the phase's training steps, without entries of evaluations alone."""
        return [line for line in self.read_metrics(phase) if "train/loss" in line]

    def cut_metrics(self, phase: str, step: int, *, evaluated: bool) -> int:
        """Remove the lines of the phase after `step` from metrics.jsonl, and incomplete lines.
        Returns the number of steps that have to be repeated.

        `evaluated`: keep the evaluation of `step` itself.
        """
        if not self.metrics.is_file():
            return 0
        lines = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        remaining = [text for text in lines if (line := _parse_line(text)) and _survives_cut(line, phase, step, evaluated)]
        if remaining != lines:
            write_text(self.metrics, "".join(remaining))
        return len({line["step"] for line in map(_parse_line, lines) if line.get("phase") == phase and line["step"] > step})


def _survives_cut(line: Mapping[str, Any], phase: str, step: int, evaluated: bool) -> bool:
    """Whether `RunDirectory.cut_metrics` keeps the line."""
    if line.get("phase") != phase or line["step"] < step:
        return True
    only_measured = not any(key.startswith("train/") for key in line)
    return bool(line["step"] == step and (evaluated or not only_measured))


def _parse_line(line: str) -> dict[str, Any]:
    """The record of a line; empty if the line is incomplete."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


class EpochsDirectory(RunDirectory):
    """The folder of a run over a fixed set of samples."""

    @classmethod
    def default_name(cls, recipe: Any) -> str:
        data = recipe.task.kind.rpartition(":")[2] if recipe.data is None else list_data_files(recipe.data, "data")[0].stem
        return f"{cls.last_phase}-{data}-seed{recipe.seed}"


class SFTDirectory(EpochsDirectory):
    """The folder of a supervised run."""

    command, first_phase, last_phase = "sft", "sft", "sft"
    run_class, compose = "ludic.runs.sft:SFTRun", staticmethod(compose_sft)

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.picture = path / "loss.png"
        self.demonstrations = path / "data.jsonl"


class PairsDirectory(EpochsDirectory):
    """The folder of a run over preference pairs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.picture = path / "training.png"
        self.reliability = path / "reliability.png"
        self.margins = path / "margins.png"
        self.pairs = path / "data.jsonl"
        self.heldout_pairs = path / "heldout.jsonl"


class RMDirectory(PairsDirectory):
    """The folder of a reward-model run."""

    command, first_phase, last_phase = "train-rm", "rm", "rm"
    run_class, compose = "ludic.runs.reward_model:RMRun", staticmethod(compose_rm)

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.scores = path / "heldout_scores.json"


class DPODirectory(PairsDirectory):
    """The folder of a run of direct preference optimization."""

    command, first_phase, last_phase = "dpo", "warm_up", "dpo"
    run_class, compose = "ludic.runs.dpo:DPORun", staticmethod(compose_dpo)

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.answers = path / "answers.jsonl"
        self.reference_logps = path / "reference.logps"

    @property
    def has_all_weights(self) -> bool:
        return self.reference_logps.is_file() and super().has_all_weights


DIRECTORIES: dict[str, type[RunDirectory]] = {
    kind.command: kind for kind in (RunDirectory, SFTDirectory, RMDirectory, DPODirectory)
}
"""Command to the folder of its runs."""


def is_run(path: Path) -> bool:
    """Whether a run was begun in the folder."""
    return (path / "config.yaml").is_file() and (path / "progress.json").is_file()


def check_is_run(path: Path) -> None:
    if not is_run(path):
        raise CheckpointError(
            f"{path} is not the folder of a run, with config.yaml and progress.json; name one, such as runs/NAME"
        )


def run_path(output: str, name: str | None, default_name: str) -> Path:
    """`output/name`, or `output/default_name` without a name. Raises ConfigError for a name that is
    outside of `output`."""
    inside = name is None or (name and Path(name).name not in ("", ".", "..") and ".." not in Path(name).parts)
    if not inside or (name is not None and Path(name).is_absolute()):
        raise ConfigError(f"name ({name}) must name a folder in output ({output}); set output=FOLDER for another place")
    return Path(output).expanduser() / (name or default_name)


def make_folder(path: Path) -> None:
    """Make `path` and its parents. Raises FileExistsError if it exists, and ConfigError where no
    folder can be made, such as in /proc."""
    try:
        path.mkdir(parents=True)
    except FileNotFoundError as error:
        raise ConfigError(f"output: {path} cannot be made ({error.filename}: {error.strerror}); set output=FOLDER") from error


def make_run_folder(output: str, name: str | None, default_name: str) -> Path:
    """Make an empty `output/name`. Without a name it is `output/default_name`; if that exists, the
    time is appended, and then a number."""
    path = run_path(output, name, default_name)
    for candidate in [path] if name is not None else _list_candidates(path):
        try:
            make_folder(candidate)
            return candidate
        except FileExistsError:
            continue
    raise CheckpointError(f"{path} exists already; choose another name=")


def _move_to_free_name(folder: Path, path: Path, *, is_chosen: bool) -> Path:
    """Rename `folder`, which is not empty, to `path`. If that exists and the user did not choose
    the name, the time is appended."""
    for candidate in [path] if is_chosen else _list_candidates(path):
        if candidate.exists() or candidate.is_symlink():
            continue
        try:
            os.rename(folder, candidate)
            return candidate
        except OSError as error:  # another process made it first
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    raise _taken(path)


def check_name(output: str, name: str | None) -> None:
    """Raise ConfigError for a name that no folder can have, CheckpointError for one that is
    taken."""
    path = run_path(output, name, "run")
    if name is not None and (path.exists() or path.is_symlink()):
        raise _taken(path)


def _taken(path: Path) -> CheckpointError:
    is_run = (path / "progress.json").is_file()
    can_resume = f", or resume it with --resume {path}, in Python train(resume=True)"
    remedy = can_resume if is_run else " (it holds no run that --resume could continue), or delete it"
    return CheckpointError(f"{path} exists already; choose another name={remedy}")


def _list_candidates(path: Path) -> Iterator[Path]:
    yield path
    later = path.with_name(f"{path.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    yield later
    yield from (later.with_name(f"{later.name}-{number}") for number in range(2, 1000))


def collect_versions() -> dict[str, str]:
    """Versions of ludic, Python, torch and transformers, read without importing them."""
    return {
        "ludic": __version__,
        "python": platform.python_version(),
        "torch": find_version("torch") or "not installed",
        "transformers": find_version("transformers") or "not installed",
    }
