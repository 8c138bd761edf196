"""Resuming a run: its folder is opened with the settings that it began with; `steps` may be raised,
and where it executes and writes may change. `runs.base` finds the weights and cuts the logs
back to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ludic.errors import ConfigError
from ludic.files.atomic import write_text
from ludic.files.json_values import flatten_settings
from ludic.launch.rank_environment import read_rank_environment
from ludic.recipes.actors import check_actors
from ludic.recipes.compose import DEVICE_SETTINGS, read_yaml, to_plain_values, to_yaml
from ludic.recipes.overrides import RENAMED, Override, parse_override
from ludic.recipes.schema import AUTO, Recipe
from ludic.runs.directory import DONE, Progress, RunDirectory

_FREE = (
    *("name", "output", "log_every", "report_to", "rollout.log_every", "checkpoint."),
    *("inference.url", "inference.python", "inference.device", "inference.server_args", "inference.weights"),
    *("inference.trainer_address", "inference.timeout_s", "inference.push_", "inference.preflight", "ranks."),
    *("sharding.kind", "sharding.shards", "sharding.context", "sharding.cpu_offload"),
    *("sharding.activation_checkpointing", "gradient_checkpointing"),
    *("place.", "queue.url", "queue.lease_s", "queue.patience_s"),
    *("callbacks.keep_best", "callbacks.push_to_hub", "callbacks.private", "callbacks.completions"),
    *("judge.url", "judge.api_key_env", "judge.batch", "judge.timeout_s", "judge.cache"),
    *("profile.", "trainer.peak_tflops", "warmup.trainer.peak_tflops"),
)
"""Settings, or prefixes of settings, that may differ on resume: they change where a run executes
and writes, not its result."""
DECAYING = ("cosine", "linear", "wsd")
"""Schedules that reach their minimum at the number of steps that the run began with."""
_FOLDER = ("name", "output")
_MORE = re.compile(r"steps=\+(\d{1,12})")


@dataclass(frozen=True)
class Changes:
    """What the command line of `--resume` changes in a run."""

    steps: int | None = None
    """The total number of steps."""
    more_steps: int | None = None
    """Steps in addition to the run's present total."""
    settings: tuple[Override, ...] = ()
    """Other settings, each of which may differ on resume."""

    @property
    def texts(self) -> list[str]:
        """The other settings as arguments."""
        return [override.text for override in self.settings]


def parse_changes(arguments: Sequence[str], command: str) -> Changes:
    """`steps=N` or `steps=+N`, and settings that may differ on resume but for the name of the run's
    folder. Raises ConfigError for any other argument."""
    more = [int(found[1]) for argument in arguments if (found := _MORE.fullmatch(argument))]
    arguments = [argument for argument in arguments if not _MORE.fullmatch(argument)]
    overrides = [parse_override(argument) for argument in arguments if "=" in argument]
    steps = [override.value for override in overrides if override.key == "steps"]
    others = tuple(override for override in overrides if override.key != "steps")
    keys = [f"{override.key}." if isinstance(override.value, Mapping) else override.key for override in others]
    if (
        len(overrides) != len(arguments)
        or any(type(value) is not int for value in steps)
        or not all(key.startswith(_FREE) and key not in _FOLDER for key in keys)
    ):
        raise ConfigError(
            f"--resume accepts steps=N, steps=+N and where the run executes and writes (ranks, place, queue.url, inference.url, "
            f"checkpoint.*, log_every and others), not {' '.join(arguments)}; start a new run with `ludic {command}`"
        )
    if len(steps) + len(more) > 1 or more == [0]:
        raise ConfigError("--resume takes one number of steps: steps=N for N in all, or steps=+N for N more, with N at least 1")
    return Changes(steps[0] if steps else None, more[0] if more else None, others)


def resume_run(
    kind: type[RunDirectory], path: Path, changes: Changes, compose: Callable[[Sequence[str]], Any]
) -> tuple[Any, RunDirectory]:
    """The recipe of the run in the folder `path`, with `changes`, and the folder, locked. The
    changes are written to config.yaml, where the processes of the run read them: with more steps
    the whole recipe, else the changed settings alone.

    Raises ConfigError, which names the setting, if the recipe differs from the one that the run
    began with.
    """
    directory = kind.resume(path)
    try:
        recipe, progress = compose([str(directory.config), *changes.texts]), directory.read_progress()
        steps = find_steps(changes, recipe, directory)
        if steps is not None:
            _check_more(recipe, progress, directory, steps)
            recipe.steps = steps
        if progress.recipe is not None:
            _check_same(progress.recipe | ({} if steps is None else {"steps": steps}), recipe, directory)
        if progress.phase != DONE or steps is not None:
            directory.check_models(recipe)
        if steps is not None:
            if progress.phase == DONE:
                progress.phase, progress.after = directory.last_phase, None
            progress.recipe = None if progress.recipe is None else to_plain_values(recipe)
            directory.write_progress(progress)
            write_text(directory.config, to_yaml(recipe))
        if changes.settings:
            if isinstance(recipe, Recipe):
                check_actors(recipe)
            tree = read_yaml(directory.config)
            for override in changes.settings:
                OmegaConf.update(tree, override.key, override.value, merge=True)
            write_text(directory.config, OmegaConf.to_yaml(tree))
        return recipe, directory
    except BaseException:
        directory.release()
        raise


def _check_same(original: Mapping[str, Any], recipe: Any, directory: RunDirectory) -> None:
    before = {RENAMED.get(key, key): value for key, value in flatten_settings(original)}
    before = {key: value for key, value in before.items() if key not in DEVICE_SETTINGS or value != AUTO}
    now = dict(flatten_settings(to_plain_values(recipe)))
    for key in sorted(before.keys() & now.keys()):
        if before[key] != now[key] and not key.startswith(_FREE):
            more = f", or raise it with --resume {directory.path} steps=N" if key == "steps" else ""
            raise ConfigError(f"{directory.config}: {key} is {now[key]}, but the run began with {before[key]}; restore it{more}")
    # A checkpoint has the position of actors or of the trainer's own sampling; the number of actors
    # may change.
    had, has = (bool(values.get("place.actors") or values.get("queue.url")) for values in (before, now))
    if had != has:
        key = "place.actors" if now.get("place.actors") != before.get("place.actors") else "queue.url"
        raise ConfigError(f"{directory.config}: {key} is {now.get(key)}, but the run began with {before.get(key)}; restore it")


def find_steps(changes: Changes, recipe: Any, directory: RunDirectory) -> int | None:
    """The total number of steps: `more_steps` are added to the number of its `recipe`. None if it
    stays. Raises ConfigError where that number is not known, and for one of several ranks: started
    again, it would add them again."""
    more, progress = changes.more_steps, directory.read_progress()
    if more is None:
        return changes.steps
    if read_rank_environment() is not None:
        raise ConfigError(f"steps=+{more} would be added at every restart of the ranks; set steps=N, for N in all")
    if recipe.steps is not None:
        return int(recipe.steps) + more
    if progress.phase != DONE:
        raise ConfigError(f"steps=+{more}: {directory.path} has unfinished epochs={recipe.epochs}; set steps=N, for N in all")
    return progress.steps + more


def _check_more(recipe: Any, progress: Progress, directory: RunDirectory, steps: int) -> None:
    logged = directory.read_metrics(directory.last_phase)  # a run that was killed has not noted its steps
    taken = max([progress.steps, *(line["step"] for line in logged[-1:])])
    if steps < taken or (progress.phase == DONE and steps == taken):
        raise ConfigError(f"steps ({steps}) must be more than the {taken} that {directory.path} has taken")
    trainer = recipe.trainer
    if trainer.lr_scheduler_type in DECAYING and not trainer.lr_min_ratio and progress.phase in (directory.last_phase, DONE):
        raise ConfigError(
            f"trainer.lr_scheduler_type ({trainer.lr_scheduler_type}) ended at a learning rate of 0; start with model={directory.model}"
        )
