"""What a recipe says about sampling: whether there are actors, servers or over-sampling, and checks
of their settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ludic.errors import ConfigError
from ludic.recipes.processes import check_place, check_url, choose_kind, find_queue, is_on_one_machine
from ludic.recipes.schema import Recipe
from ludic.training.rollouts.batch_selection import choose_max_lag
from ludic.training.rollouts.group_filters import COMPARING, GROUP_FILTERS, of_rollouts
from ludic.types import Rollout
from ludic.user_objects import import_named


def uses_queue(recipe: Recipe) -> bool:
    """Whether actors sample for the run."""
    return recipe.place.actors > 0 or recipe.queue.url is not None


def count_prompts_per_entry(recipe: Recipe) -> int:
    """The prompts of an entry. By default the largest divisor of a batch that is no more than a
    quarter of it, rounded up: of 32 prompts 8, of 10 prompts 2, of 3 prompts 1."""
    prompts = recipe.rollout.prompts
    default = next(size for size in range(-(-prompts // 4), 0, -1) if prompts % size == 0)
    return recipe.queue.prompts_per_entry or default


def check_actors(recipe: Recipe) -> None:
    """Raise `ConfigError` for settings of actors, their queue or servers that contradict each
    other."""
    check_place(recipe.place)
    weights = recipe.inference.weights
    if recipe.place.servers and weights not in (None, "disk"):
        raise ConfigError(f"inference.weights ({weights}) must be disk with place.servers; leave it out, or set inference.url")
    if not uses_queue(recipe):
        return
    section, ahead = recipe.queue, recipe.inference.batches_ahead
    if section.url is not None:
        check_url(section.url)
    address = find_queue(section, Path())  # raises for a wrong LUDIC_QUEUE_URL
    place, samples_on_servers = recipe.place, choose_kind(recipe.inference) == "vllm"
    if section.order == "exact" and ahead > 0 and (samples_on_servers or place.servers):
        raise ConfigError(f"inference.batches_ahead ({ahead}) must be 0 with servers, unless queue.order=arrival")
    if samples_on_servers and recipe.inference.url is None and not place.servers:
        raise ConfigError("place.actors with inference=vllm needs servers: set place.servers=N, or inference.url to started ones")
    if place.actors and not is_on_one_machine(place) and "://" not in address:  # locks of SQLite need a local file system
        raise ConfigError(f"actors with place.on={place.on} need a queue on Redis: set queue.url=redis://HOST:6379/0")


def uses_pool(recipe: Recipe) -> bool:
    """Whether groups are over-sampled or filtered."""
    return recipe.rollout.over_sampling_factor != 1 or recipe.rollout.group_filter is not None


def choose_lag(recipe: Recipe) -> int:
    """How many batches after it was begun a group is trained at the latest; 0 without
    over-sampling."""
    section = recipe.rollout
    return choose_max_lag(section.over_sampling_factor, section.max_lag) if uses_pool(recipe) else 0


def build_group_filter(recipe: Recipe) -> Callable[[Sequence[Rollout]], bool] | None:
    """The filter of groups by its name, or the user's own as `package.module:name`."""
    name = recipe.rollout.group_filter
    if name is None:
        return None
    if name in GROUP_FILTERS:
        return of_rollouts(GROUP_FILTERS[name])
    if ":" in name:
        return of_rollouts(import_named(name, "rollout.group_filter"))
    raise ConfigError(f"rollout.group_filter ({name}) must be one of {', '.join(GROUP_FILTERS)}, or package.module:name")


def check_over_sampling(recipe: Recipe) -> None:
    """Raise `ConfigError` for settings of over-sampling that do not fit each other."""
    section = recipe.rollout
    try:
        max_lag = choose_lag(recipe)
    except ConfigError as error:
        raise ConfigError(f"rollout.{error}") from error
    build_group_filter(recipe)
    if GROUP_FILTERS.get(section.group_filter or "") in COMPARING and section.group_size == 1:
        raise ConfigError(f"rollout.group_filter ({section.group_filter}) compares answers; set rollout.group_size to at least 2")
    if max_lag and choose_kind(recipe.inference) == "local" and not recipe.trainer.sync_every_steps:
        raise ConfigError("trainer.sync_every_steps (0) never updates the model that over-sampling samples from; set it to 1")
