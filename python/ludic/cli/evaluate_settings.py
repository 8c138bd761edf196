"""The settings of `ludic eval`: a recipe with overrides, as in `ludic train`, and settings that
only an evaluation has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Optional, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ludic.cli.run_folder import expand_run_folder
from ludic.errors import ConfigError
from ludic.recipes.compose import compose
from ludic.recipes.devices import choose_devices
from ludic.recipes.overrides import Override, parse_override
from ludic.recipes.schema import Recipe

SHORT_NAMES = {
    "k": "evaluation.samples_per_prompt",
    "problems": "evaluation.prompts",
    "solved_at": "evaluation.solved_at",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "max_tokens": "rollout.max_new_tokens",
    "concurrency": "rollout.concurrency",
    "system_prompt": "rollout.system_prompt",
    "device": "trainer.model_device",
}
"""Short name in `ludic eval` -> field of the recipe."""


@dataclass
class EvalSettings:
    """Settings that no recipe has."""

    base_url: Optional[str] = None  # noqa: UP045  OmegaConf reads this annotation at run time
    """URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1; null: the model runs
    in this process."""
    api_key_env: Optional[str] = None  # noqa: UP045
    """Name of the environment variable with the server's API key; null: none is sent."""
    returns_token_ids: bool = False
    """The server supports vLLM's `return_token_ids`; rollouts then contain the tokens."""
    timeout_s: float = 600.0
    """Deadline of one model call, in seconds."""
    episode_timeout_s: Optional[float] = None  # noqa: UP045
    """Deadline of a whole episode, in seconds; null: none."""
    episode_retries: int = 1
    """How often a failed episode is retried."""
    suite: Optional[str] = None  # noqa: UP045
    """The set of held-out problems, for tasks with several sets, such as `perfect` of tictactoe;
    null: the first."""
    confidence: float = 0.95
    """Confidence level of all intervals."""


def resolve(arguments: Sequence[str]) -> tuple[Recipe, EvalSettings]:
    """The recipe and settings of the command line. `arguments`: the name of a recipe, a YAML
    file or the folder of a run, and overrides, in any order. Later overrides win."""
    own = {field.name for field in fields(EvalSettings)}
    for_recipe: list[str] = []
    overrides: list[Override] = []
    for argument in arguments:
        if "=" not in argument or Path(argument).exists():
            for_recipe[:0] = expand_run_folder(argument)
            continue
        override = parse_override(argument)
        if override.key.startswith("inference."):
            raise ConfigError(f"{override.text}: an evaluation queries a server with base_url=URL; `ludic serve` starts one")
        if override.key in own:
            overrides.append(override)
        else:
            for_recipe.append(_expand_short_name(override))
    recipe = _compose(for_recipe)
    if recipe.rollout.temperature == 0 and recipe.evaluation.samples_per_prompt > 1:
        _use_one_sample(recipe, for_recipe)
    return recipe, _parse_settings(overrides)


def _expand_short_name(override: Override) -> str:
    name = SHORT_NAMES.get(override.key)
    return override.text if name is None else name + override.text[override.text.index("=") :]


def _compose(arguments: Sequence[str]) -> Recipe:
    try:
        recipe = compose(arguments)
    except ConfigError as error:
        names = [*SHORT_NAMES, *(field.name for field in fields(EvalSettings))]
        keys = [argument.partition("=")[0] for argument in arguments if "=" in argument]
        near = [match for key in keys if key in str(error) for match in get_close_matches(key, names, n=1)]
        raise ConfigError(f"{error} (of an evaluation: {', '.join(near)})" if near else str(error)) from error
    choose_devices(recipe)
    return recipe


def _use_one_sample(recipe: Recipe, overrides: Sequence[str]) -> None:
    if any(argument.startswith(f"{SHORT_NAMES['k']}=") for argument in overrides):
        k = recipe.evaluation.samples_per_prompt
        raise ConfigError(
            f"k ({k}) answers at temperature 0 are {k} copies of one answer; leave k out, or set temperature above 0"
        )
    recipe.evaluation.samples_per_prompt = 1


def _parse_settings(overrides: Sequence[Override]) -> EvalSettings:
    tree = OmegaConf.structured(EvalSettings)
    for override in overrides:
        try:
            OmegaConf.update(tree, override.key, override.value)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{override.text}: {str(error).splitlines()[0]}") from error
    settings = cast(EvalSettings, OmegaConf.to_object(tree))
    if settings.timeout_s <= 0:
        raise ConfigError(f"timeout_s ({settings.timeout_s}) must be > 0; a call without a deadline may never end")
    if not 0 < settings.confidence < 1:
        raise ConfigError(f"confidence ({settings.confidence:g}) must be between 0 and 1, such as 0.95")
    if settings.episode_timeout_s is not None and settings.episode_timeout_s <= 0:
        raise ConfigError(f"episode_timeout_s ({settings.episode_timeout_s:g}) must be > 0, or null for no limit")
    if settings.episode_retries < 0:
        raise ConfigError(f"episode_retries ({settings.episode_retries}) must be >= 0; 0 never retries a failed episode")
    return settings
