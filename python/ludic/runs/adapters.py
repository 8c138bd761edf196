"""Whether the servers of a run get its adapters alone, and what these are called there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ludic.distributed.adapters.lora import LoraPublisher
from ludic.errors import ConfigError
from ludic.inference.client import PushTarget
from ludic.recipes.model import why_merged
from ludic.recipes.schema import Recipe
from ludic.runs.actors.queue import make_run_id

SERVED_NAME = "policy"
"""The name of the policy in requests."""


def name_adapters(run: Path) -> str:
    """What the names of the run's adapters at its servers begin with."""
    return f"{run.name}-{make_run_id(run)[:8]}"


def try_adapters(
    recipe: Recipe, target: PushTarget, model: Any, run: Path, note: Callable[[str], None], requested: str = SERVED_NAME
) -> LoraPublisher | None:
    """A publisher of the run's adapters for requests of the model `requested`, if the servers have
    taken them in a trial; else None, and a note says why. Raises ConfigError for
    `lora.publish=adapter` then."""
    if not recipe.lora.rank:
        return None
    name, timeout_s = name_adapters(run), recipe.inference.push_timeout_s
    publisher = LoraPublisher(target, model, name=requested, served_as=name, timeout_s=timeout_s)
    reason = why_merged(recipe) or publisher.find_refusal()
    if reason is None and recipe.lora.publish == "auto":
        versions = {server.endpoints.weight_version() for server in publisher.servers}
        reason = None if versions == {"default"} else f"servers have weights that were pushed ({versions})"
    if reason is None:
        note(f"Adapters are pushed as {name}@STEP")
        return publisher
    if recipe.lora.publish == "adapter":
        raise ConfigError(f"lora.publish=adapter is not possible: {reason}")
    note(f"Merged weights are pushed: {reason}")
    publisher.close()  # takes off the adapters of an earlier trainer, which actors would find
    return None
