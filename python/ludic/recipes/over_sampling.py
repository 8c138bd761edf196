"""What a recipe says of over-sampling and of groups that are replaced: whether there is any, and
checks of the settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields

from ludic.errors import ConfigError
from ludic.recipes.actors import uses_queue
from ludic.recipes.inference_section import choose_kind
from ludic.recipes.schema import Recipe, RolloutSection
from ludic.training.rollouts.group_filters import (
    COMPARING,
    GroupFilter,
    check_any_success,
    check_quality_and_diversity,
    check_response_diversity,
    check_reward_nonzero_std,
    of_rollouts,
)
from ludic.training.rollouts.group_pool import ORDERS
from ludic.training.rollouts.hand_over import choose_max_lag
from ludic.types import Rollout
from ludic.user_objects import import_named

GROUP_FILTERS: dict[str, GroupFilter] = {
    "nonzero_std": check_reward_nonzero_std,
    "any_success": check_any_success,
    "response_diversity": check_response_diversity,
    "quality_and_diversity": check_quality_and_diversity,
}
SETTINGS_OF_POOL = ("order", "max_lag", "patience", "outage_patience_s")


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
    raise ConfigError(
        f"rollout.group_filter ({name}) must be one of {', '.join(GROUP_FILTERS)}, or a function of your own as package.module:name"
    )


def check_over_sampling(recipe: Recipe) -> None:
    """Raise `ConfigError` for settings of over-sampling that are wrong, have no effect, or do not
    go together with others."""
    section = recipe.rollout
    if not uses_pool(recipe):
        defaults = {item.name: item.default for item in fields(RolloutSection)}
        for name in SETTINGS_OF_POOL:
            if getattr(section, name) != defaults[name]:
                raise ConfigError(
                    f"rollout.{name} has no effect in a run without over-sampling and group filter; set rollout.over_sampling_factor or "
                    "rollout.group_filter too"
                )
        return
    if section.order not in ORDERS:
        raise ConfigError(f"rollout.order ({section.order}) must be {' or '.join(ORDERS)}")
    try:
        max_lag = choose_lag(recipe)
    except ConfigError as error:
        raise ConfigError(f"rollout.{error}") from error
    if not 0 <= section.outage_patience_s < math.inf:
        raise ConfigError(f"rollout.outage_patience_s ({section.outage_patience_s}) must be >= 0 seconds, and finite")
    build_group_filter(recipe)
    if GROUP_FILTERS.get(section.group_filter or "") in COMPARING and section.group_size == 1:
        raise ConfigError(
            f"rollout.group_filter ({section.group_filter}) compares the answers to a problem, and would replace every problem with "
            "rollout.group_size=1; set rollout.group_size to at least 2, or another filter"
        )
    _check_others(recipe, max_lag)


def _check_others(recipe: Recipe, max_lag: int) -> None:
    setting = "rollout.group_filter" if recipe.rollout.over_sampling_factor == 1 else "rollout.over_sampling_factor"
    if uses_queue(recipe):
        raise ConfigError(
            f"{setting} does not go together with place.actors and queue.url: actors deliver the groups that were numbered for a batch, "
            "and none is replaced; leave it out, or sample in this process or from servers (inference=vllm)"
        )
    if recipe.inference.batches_ahead:
        raise ConfigError(
            f"{setting} does not go together with inference.batches_ahead ({recipe.inference.batches_ahead}), which begins whole batches "
            "ahead; set inference.batches_ahead=0, and rollout.over_sampling_factor=2 to have a batch more in the air"
        )
    if max_lag and choose_kind(recipe.inference) == "local" and not recipe.trainer.sync_every_steps:
        raise ConfigError(
            f"{setting} samples from a copy of the model while the trainer computes, and trainer.sync_every_steps=0 never updates it; set "
            "it to 1"
        )
