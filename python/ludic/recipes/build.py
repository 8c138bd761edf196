"""Names turned into objects: the task, the algorithm, the trainer's configuration."""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable
from dataclasses import asdict
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from ludic.errors import ConfigError
from ludic.recipes.compose import check_least
from ludic.recipes.schema import Recipe, TaskSection
from ludic.tasks import Addition, DigitSort, EpisodicTask, Task, TicTacToe, Tools, as_episodic
from ludic.tasks.data_task import DataTask
from ludic.tasks.importing import import_named
from ludic.tasks.judged import judged_by
from ludic.training.algorithm import RLAlgorithm
from ludic.training.config import TrainerConfig
from ludic.training.presets.registry import REGISTRY

if TYPE_CHECKING:
    from ludic.recipes.epochs_schema import EpochsRecipe

C = TypeVar("C", bound=TrainerConfig)
T = TypeVar("T")

TASKS: dict[str, Callable[..., Task | EpisodicTask]] = {
    "sort": DigitSort,
    "addition": Addition,
    "tictactoe": TicTacToe,
    "tools": Tools,
}

_LEAST = {
    **dict.fromkeys(("steps", "warmup.steps", "rollout.log_every", "seed"), 0),
    **dict.fromkeys(("threads", "log_every", "warmup.batch_size", "evaluation.prompts", "evaluation.samples_per_prompt"), 1),
    **dict.fromkeys(("rollout.prompts", "rollout.group_size", "rollout.max_new_tokens", "rollout.concurrency"), 1),
}


def check_numbers(recipe: Recipe) -> None:
    """Raise `ConfigError` for a count that is too small to mean anything."""
    check_least(recipe, _LEAST)


def seed_everything(recipe: Recipe | EpochsRecipe) -> None:
    """Every generator that weights, data and sampling are drawn from, and torch's threads: two
    runs of one recipe are the same."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    random.seed(recipe.seed)
    torch.manual_seed(recipe.seed)


def seed_phase(seed: int, phase: str) -> None:
    """Every global generator, by the seed and the phase alone: what a phase draws does not
    depend on what was drawn before it, nor on whether it is begun by the run or by one that goes
    on with it."""
    derived = int.from_bytes(hashlib.sha256(f"{seed} {phase}".encode()).digest()[:4], "little")
    random.seed(derived)
    np.random.seed(derived)
    torch.manual_seed(derived)


def build_task(
    section: TaskSection,
    *,
    data: str | None = None,
    reward: Any = None,
    reward_weights: Any = None,
    judged: bool = False,
) -> Task | EpisodicTask:
    """A built-in task by its name, a class of the user's own as `package.module:Class`, or a
    data set with its rewards, or `judged` by a reward model alone."""
    if section.kind == "data":
        given = {"data": data, "reward": reward, "reward_weights": reward_weights, "judged": judged}
        return _call(DataTask, {**section.args, **given}, "task.args")
    if data is not None or reward is not None:
        raise ConfigError(f"data and reward make a task of their own (task.kind=data); task.kind is {section.kind}")
    return build_named(TASKS, section)


def build_named(registry: dict[str, Callable[..., Any]], section: TaskSection) -> Any:
    """What the registry has by that name, or a class of the user's own as
    `package.module:Class`, with its arguments."""
    own = ":" in section.kind
    make = import_named(section.kind, "task.kind") if own else _look_up(registry, section.kind, "task.kind")
    return _call(make, section.args, "task.args")


def task_of(recipe: Recipe) -> EpisodicTask:
    """The task of a recipe, whatever it is, as one of episodes."""
    given = {"data": recipe.data, "reward": recipe.reward, "reward_weights": recipe.reward_weights}
    return as_episodic(build_task(recipe.task, **given, judged=recipe.reward_model is not None))


def with_reward_model(recipe: Recipe, task: EpisodicTask, tokenizer: Any) -> EpisodicTask:
    """The task, whose training the recipe's reward model rewards if there is one. `tokenizer` is
    the policy's."""
    if recipe.reward_model is None:
        if recipe.reward_model_args:
            raise ConfigError("reward_model_args are those of a reward model; set reward_model=DIRECTORY")
        return task
    given = {
        "task": task,
        "tokenizer": tokenizer,
        "source": recipe.reward_model,
        "device": recipe.trainer.model_device,
    }
    judged_task: EpisodicTask = _call(judged_by, {**recipe.reward_model_args, **given}, "reward_model_args")
    return judged_task


def build_algorithm(recipe: Recipe, *, max_completion_tokens: int | None = None) -> RLAlgorithm:
    """The preset of that name with `algorithm_args`. The group size is that of the rollouts, and
    `max_completion_tokens`, the limit of an answer, goes to the presets that ask for it."""
    make = _look_up(REGISTRY, recipe.algorithm, "algorithm").make
    _check_groups_differ(recipe, make)
    given = dict(recipe.algorithm_args)
    derived = {"group_size": recipe.rollout.group_size, "max_completion_tokens": max_completion_tokens}
    taken = inspect.signature(make).parameters
    return _call(make, {**{name: value for name, value in derived.items() if name in taken}, **given}, "algorithm_args")


def _check_groups_differ(recipe: Recipe, make: Callable[..., RLAlgorithm]) -> None:
    """Raise `ConfigError` where an algorithm that learns from what differs within a group is
    given groups of one answer."""
    group_size = inspect.signature(make).parameters.get("group_size")
    compares = group_size is not None and group_size.default is group_size.empty
    if compares and recipe.rollout.temperature == 0 and recipe.steps > 0:
        raise ConfigError(
            f"rollout.temperature (0) gives all members of a group one answer, and {recipe.algorithm} learns from what differs between "
            "them; raise it, or take an algorithm without groups, such as algorithm=reinforce_baseline"
        )


def build_trainer_config(section: Any, **derived: Any) -> TrainerConfig:
    """`derived`: what follows from the recipe (`schema.DERIVED`)."""
    return build_config(TrainerConfig, section, **derived)


def check_device(name: str) -> None:
    """Raise `ConfigError` for a device that torch does not know or this machine does not have."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"trainer.model_device ({name}) must be a device of torch, such as cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.model_device ({name}): torch finds no GPU here; set trainer.model_device=cpu, or see `ludic doctor`"
        )
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"trainer.model_device ({name}): this machine has {torch.cuda.device_count()} GPUs, counted from cuda:0"
        )


def build_config(config: type[C], section: Any, **derived: Any) -> C:
    """Fields left at their default are not passed, so that the trainer can tell what was asked
    for."""
    check_device(section.model_device)
    defaults = config()
    asked = {name: value for name, value in asdict(section).items() if value != getattr(defaults, name)}
    return config(**asked, **derived)


def _look_up(registry: dict[str, T], name: str, setting: str) -> T:
    if name in registry:
        return registry[name]
    near = get_close_matches(name, registry, n=2)
    remedy = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(registry))}"
    raise ConfigError(f"{setting} ({name}) is not known; {remedy}")


def _call(make: Callable[..., Any], arguments: dict[str, Any], setting: str) -> Any:
    """`make(**arguments)`, where an argument that it does not take is an error with a
    suggestion."""
    known = list(inspect.signature(make).parameters)
    for name in arguments:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            raise ConfigError(f"{setting}.{name}: {getattr(make, '__name__', make)} has no such argument; {remedy}")
    return make(**arguments)
