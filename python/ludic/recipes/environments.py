"""The section `environments` of a recipe: several problems in one run, each with settings of its
own and a weight. What an environment leaves out is the recipe's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ludic.data.passes import Shares
from ludic.errors import ConfigError, did_you_mean
from ludic.recipes.agent_section import has_agent
from ludic.recipes.overrides import first_line
from ludic.recipes.rules import check_settings
from ludic.recipes.schema import Recipe

_OF_DATA = ("data", "streaming", "reward", "reward_weights", "reward_normalize", "eval_reward", "eval_reward_weights")
OWN = (
    *("weight", "task.kind", "task.args", *_OF_DATA, "tools", "process_reward", "algorithm_args"),
    *("agent", "reward_model", "reward_model_args"),
    *("rollout.group_size", "rollout.max_new_tokens", "rollout.stop", "rollout.system_prompt"),
    *("rollout.max_tool_turns", "rollout.tool_timeout_s"),
    *("evaluation.prompts", "evaluation.samples_per_prompt", "evaluation.solved_at"),
)
"""What an environment may set."""
CREDIT_ARGS = (
    *("group_normalize_adv", "normalize", "positive_only", "k", "gamma"),
    *("overlong_buffer_tokens", "overlong_factor"),
)
"""The arguments of an algorithm that an environment may set: they give credit to its answers, and
change nothing in the loss, which is one for all."""
TAKEN_NAMES = (
    *("rewards", "guard", "perf", "ranks", "queue", "actors", "groups", "reference", "critic", "images"),
    *("mismatch", "seed", "eval_seed", "train", "eval"),
)
"""Prefixes of other metrics."""


def split_recipe(recipe: Recipe) -> dict[str, Recipe]:
    """The recipe of each environment by its name; empty without environments. Raises ConfigError
    for what an environment cannot set, and for a setting that breaks a rule."""
    given = {name: own for name, own in recipe.environments.items() if own is not None}
    whole = deepcopy(replace(recipe, environments={})) if given else recipe
    return {str(name): _overlay(whole, str(name), own) for name, own in given.items()}


def _overlay(whole: Recipe, name: str, own: Any) -> Recipe:
    where = f"environments.{name}"
    if not re.fullmatch(r"(?!eval_|gpu_|train_)[A-Za-z][\w-]*", name) or name in TAKEN_NAMES:
        raise ConfigError(f"environments ({name}) must have a name of letters, digits, - and _ that is no prefix of metrics")
    if not isinstance(own, Mapping):
        raise ConfigError(f"{where} ({own}) must have settings, such as {{task: {{kind: sort}}, weight: 2}}")
    paths = dict(_list_paths(own))
    for path in paths:
        if path not in OWN:
            remedy = did_you_mean(path, OWN, "set it for all, outside of environments", cutoff=0.8)
            raise ConfigError(f"{where}.{path} cannot differ between environments{remedy}")
    for argument in paths.get("algorithm_args") or ():
        if argument not in CREDIT_ARGS:
            allowed = f"these can differ: {', '.join(CREDIT_ARGS)}"
            raise ConfigError(f"{where}.algorithm_args.{argument} belongs to the loss, which is one for all; {allowed}")
    own = {key: value for key, value in own.items() if key != "weight"}
    has_rows = any(paths.get(key) is not None for key in ("data", "reward"))
    kind = paths.get("task.kind", "data" if has_rows else whole.task.kind)
    if kind != whole.task.kind:  # the recipe's rows and arguments are of another task
        base = Recipe()
        whole = replace(whole, task=replace(whole.task, kind=kind, args={}), **{key: getattr(base, key) for key in _OF_DATA})
    try:
        part = cast(Recipe, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(whole), own)))
        check_settings(part)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {first_line(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return part


def _list_paths(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of the settings; arguments are one setting."""
    for key, value in section.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and any(own.startswith(f"{path}.") for own in OWN):
            yield from _list_paths(value, f"{path}.")
        else:
            yield path, value


def choose_environment(recipe: Recipe, name: str | None) -> Recipe:
    """The recipe of an environment; the recipe itself if it has none. Raises ConfigError for a name
    that it does not have, and for none if it has several."""
    parts = split_recipe(recipe)
    if not parts and name is None:
        return recipe
    if name not in parts:
        several = f"is one of {', '.join(parts)}" if parts else "needs a recipe with environments; leave it out"
        raise ConfigError(f"environment ({name}) {several}")
    return parts[name]


def read_weights(recipe: Recipe) -> list[dict[int, Fraction]]:
    """The weights of each environment by the step at which they begin. Raises ConfigError for
    other values."""
    weights = []
    for name, own in recipe.environments.items():
        if own is None:
            continue
        given = own.get("weight", 1)
        by_step = given if isinstance(given, Mapping) else {0: given}
        if not by_step or not all(_is_step(step) and _is_weight(weight) for step, weight in by_step.items()):
            rule = "must be a number >= 0, or such numbers by the step from which they hold: {0: 1, 200: 3}"
            raise ConfigError(f"environments.{name}.weight ({given}) {rule}")
        weights.append({int(step): Fraction(str(weight)) for step, weight in by_step.items()})
    return weights


def _is_step(step: Any) -> bool:
    return not isinstance(step, bool) and str(step).isdecimal()


def _is_weight(weight: Any) -> bool:
    return not isinstance(weight, bool) and isinstance(weight, int | float) and 0 <= weight < math.inf


def check_environments(recipe: Recipe) -> None:
    """Raise ConfigError for environments that cannot be, and for settings that do not go together
    with them."""
    parts = split_recipe(recipe)
    if not parts:
        return
    try:
        Shares(read_weights(recipe))
    except ConfigError as error:
        raise ConfigError(f"environments: {error}") from error
    excluded = {
        f"curriculum.kind ({recipe.curriculum.kind})": recipe.curriculum.kind is not None,
        f"info_seed.num_seeds ({recipe.info_seed.num_seeds})": recipe.info_seed.num_seeds > 0,
    }
    for setting, is_set in excluded.items():
        if is_set:
            raise ConfigError(f"{setting} does not go together with environments; leave one of them out")
    if has_agent(recipe.agent):
        raise ConfigError("agent plays one kind of problem; set environments.NAME.agent for those that it plays")
    sizes = {part.rollout.group_size for part in parts.values()}
    if len(sizes) > 1 and (recipe.rollout.over_sampling_factor != 1 or recipe.rollout.group_filter is not None):
        raise ConfigError(
            f"rollout.group_size ({', '.join(map(str, sorted(sizes)))}) differs between environments, and over-sampling and "
            "rollout.group_filter need one; set it for all"
        )
