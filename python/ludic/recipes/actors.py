"""What a recipe says of actors and servers as a whole: whether there are any, and checks of their
settings."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from ludic.errors import ConfigError
from ludic.recipes.inference_section import choose_kind
from ludic.recipes.place_section import check_place, is_on_one_machine
from ludic.recipes.queue_section import QueueSection, check_url, find_queue
from ludic.recipes.schema import Recipe

ORDERS = ("exact", "arrival")
ENTRIES_PER_BATCH = 4
"""How many entries a batch has by default, so that as many actors share one."""


def uses_queue(recipe: Recipe) -> bool:
    """Whether actors sample for the run."""
    return recipe.place.actors > 0 or recipe.queue.url is not None


def count_prompts_per_entry(recipe: Recipe) -> int:
    """The prompts of an entry. By default the largest divisor of a batch that is no more than a
    quarter of it, rounded up: of 32 prompts 8, of 10 prompts 2, of 3 prompts 1."""
    prompts, chosen = recipe.rollout.prompts, recipe.queue.prompts_per_entry
    if chosen is not None:
        return chosen
    quarter = -(-prompts // ENTRIES_PER_BATCH)
    return next(size for size in range(quarter, 0, -1) if prompts % size == 0)


def check_actors(recipe: Recipe) -> None:
    """Raise `ConfigError` for settings of actors, of their queue or of servers that are wrong, or
    that have no effect."""
    check_place(recipe.place)
    _check_servers(recipe)
    if uses_queue(recipe):
        _check_queue(recipe)
    elif changed := [item.name for item in fields(QueueSection) if getattr(recipe.queue, item.name) != item.default]:
        raise ConfigError(f"queue.{changed[0]} has no effect in a run without actors; set place.actors=N too, or queue.url")


def _check_queue(recipe: Recipe) -> None:
    section = recipe.queue
    if section.order not in ORDERS:
        raise ConfigError(f"queue.order ({section.order}) must be {' or '.join(ORDERS)}")
    if section.max_lag is not None:
        _check_max_lag(section, recipe.inference.batches_ahead)
    size, prompts = section.prompts_per_entry, recipe.rollout.prompts
    if size is not None and (size < 1 or prompts % size):
        raise ConfigError(f"queue.prompts_per_entry ({size}) must divide rollout.prompts ({prompts})")
    for name, value in (("lease_s", section.lease_s), ("patience_s", section.patience_s)):
        if not value > 0:
            raise ConfigError(f"queue.{name} ({value}) must be > 0")
    if section.url is not None:
        check_url(section.url)
    find_queue(section, Path())  # raises for a wrong LUDIC_QUEUE_URL
    _check_exact(recipe)
    if choose_kind(recipe.inference) == "vllm" and recipe.inference.url is None and not recipe.place.servers:
        raise ConfigError(
            "place.actors with inference=vllm needs servers that actors and trainer share: set place.servers=N, or inference.url to those "
            "that you started with `ludic serve`"
        )
    _check_reached(recipe)


def _check_servers(recipe: Recipe) -> None:
    """Raise ConfigError for settings that do not go with servers of the run."""
    servers, section = recipe.place.servers, recipe.inference
    if servers == 0:
        return
    if section.url is not None:
        raise ConfigError(f"place.servers ({servers}) starts servers and inference.url names running ones; set only one of them")
    if choose_kind(section) == "local":
        raise ConfigError(f"inference=local samples without servers; leave it out, or place.servers ({servers})")
    if section.weights not in (None, "disk"):
        raise ConfigError(
            f"inference.weights ({section.weights}) must be disk with place.servers: a server that is restarted gets its weights from the "
            "run's folder; leave it out, or start the servers with `ludic serve` and set inference.url"
        )


def _check_exact(recipe: Recipe) -> None:
    """Raise ConfigError if samples cannot be of the version that the order demands: servers have
    only the newest one, and a batch ahead is of an older one."""
    ahead, samples_elsewhere = recipe.inference.batches_ahead, choose_kind(recipe.inference) == "vllm" or recipe.place.servers
    if recipe.queue.order == "exact" and ahead > 0 and samples_elsewhere:
        raise ConfigError(
            f"queue.order=exact with inference.batches_ahead ({ahead}) needs samples that are exactly so many versions old, but servers "
            "have only the newest version; set queue.order=arrival or inference.batches_ahead=0, or sample in the actors (inference=local)"
        )


def _check_reached(recipe: Recipe) -> None:
    """Raise ConfigError if actors may be on machines that do not see the queue: locks of SQLite do
    not work on network file systems."""
    place = recipe.place
    if place.actors and not is_on_one_machine(place) and "://" not in find_queue(recipe.queue, Path()):
        raise ConfigError(
            f"actors with place.on={place.on} may run on several machines, which need a queue on a Redis server: set "
            "queue.url=redis://HOST:6379/0"
        )


def _check_max_lag(section: QueueSection, ahead: int) -> None:
    if section.order == "exact":
        raise ConfigError(
            f"queue.max_lag ({section.max_lag}) has no effect with queue.order=exact, where samples are exactly inference.batches_ahead "
            f"({ahead}) versions old; set queue.order=arrival, or leave it out"
        )
    if section.max_lag is not None and section.max_lag <= ahead:
        raise ConfigError(f"queue.max_lag ({section.max_lag}) must be more than inference.batches_ahead ({ahead})")
