"""What a recipe names and a typing error would spoil: data, models, functions of the user's own.
Looked up before torch is imported, which takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.agents.tool_agent import check_tools
from ludic.data.sources import is_local, suggest_path
from ludic.errors import DataError
from ludic.files.checkpoints import ADAPTER_CONFIG, list_model_files
from ludic.models.places import CONFIGS, TOKENIZER_CONFIGS, check_place, find_adapter_base, find_place, holds_only_adapters
from ludic.recipes.environments import split_recipe
from ludic.recipes.schema import Recipe
from ludic.user_objects import GivenNames, import_named

_DATA, _MODELS = ("data", "heldout_data"), ("model", "tokenizer", "reward_model")
_ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
FROZEN_MODELS = ("reward_model", "reference.model", "teacher.model")
"""Settings of models that a checkpoint does not have."""
_FUNCTIONS = ("reward", "eval_reward", "algorithm", "task.kind", "rollout.group_filter")

GIVEN_TASKS = GivenNames[type]("tasks")
"""Classes of a script or a notebook, which no module has."""


def check_named_sources(recipe: Any) -> None:
    """Raise DataError for local data that does not exist, ConfigError for such a model, for what
    cannot be imported from `module:name`, and for functions that cannot be tools. Hub ids are not
    looked up."""
    for part in _list_parts(recipe):
        _check_part(part)


def _list_parts(recipe: Any) -> list[Any]:
    """The recipe, and that of each of its environments."""
    return [recipe, *(split_recipe(recipe).values() if isinstance(recipe, Recipe) else ())]


def _check_part(recipe: Any) -> None:
    for setting in _DATA:
        for source in list_sources(_select(recipe, setting)):
            path = Path(source).expanduser()
            if is_local(source) and not path.exists():
                remedy = suggest_path(path, "give a file, a folder, or an id of the hub")
                raise DataError(f"data: {source} does not exist, seen from {Path.cwd()}{remedy}")
    for setting in (*_MODELS, *FROZEN_MODELS[1:]):
        for source in _list_models(recipe, setting):
            check_place(source, "" if setting in _MODELS else setting)
    for setting in _FUNCTIONS:
        named = _select(recipe, setting)  # one name, a list of names, or names with their weights
        for name in [named] if isinstance(named, str) else named if isinstance(named, Sequence | Mapping) else ():
            if isinstance(name, str) and ":" in name:
                import_named(name, setting)
    check_tools(_select(recipe, "tools"))


def list_local_sources(recipe: Any) -> list[str]:
    """The data and models that exist as files or folders here, as the recipe writes them."""
    parts = _list_parts(recipe)
    named = [source for part in parts for setting in _DATA for source in list_sources(_select(part, setting))]
    named += [source for part in parts for setting in _MODELS for source in _list_models(part, setting)]
    return [source for source in dict.fromkeys(named) if Path(source).expanduser().exists()]


def list_read_models(recipe: Any, settings: Sequence[str] = (*_MODELS, *FROZEN_MODELS)) -> dict[str, list[str]]:
    """Folders here to the files in them that a run reads as the models of `settings`."""
    subfolder = (_select(recipe, "model_init_kwargs") or {}).get("subfolder", "")
    found: dict[str, list[str]] = {}
    for setting in settings:
        named = [source for part in _list_parts(recipe) for source in _list_models(part, setting)]
        for source in named:
            places = (find_place(source, *configs) for configs in (CONFIGS, TOKENIZER_CONFIGS))
            for place in filter(None, dict.fromkeys(places)):
                found |= {str(each): list_model_files(each) for each in (place, place / subfolder)}
                is_adapted = setting == "reward_model" and (place / ADAPTER_CONFIG).is_file()
                if (is_adapted or holds_only_adapters(str(place))) and (base := find_adapter_base(place)) not in named:
                    named.append(base)
    return found


def list_read_files(recipe: Any) -> dict[str, list[str]]:
    """Folders here to the files in them that a run reads as models, as its chat template, or as its
    data. A stream of data has a digest of its own."""
    found, template = list_read_models(recipe), _select(recipe, "chat_template")
    named = [template] if isinstance(template, str) and not is_template(template) else []
    for part in _list_parts(recipe):
        for data in (*(_select(part, setting) for setting in _DATA), (_select(part, "task.args") or {}).get("heldout_data")):
            named += () if _select(part, "streaming") else list_sources(data)
    for path in map(Path.expanduser, map(Path, named)):
        inside = sorted(each for each in path.glob("*") if each.suffix.lower() in _ROWS)
        for each in [path] if path.is_file() else inside:
            found.setdefault(str(each.parent), []).append(each.name)
    return found


def is_template(chat_template: str) -> bool:
    """Whether the setting is the text of a template; else it is a file that has one."""
    return "{%" in chat_template or "{{" in chat_template


def list_sources(data: Any) -> Iterator[str]:
    """The sources of `data`: one, a list, or a mixture."""
    if isinstance(data, Mapping):
        data = data.get("datasets")
    for entry in [data] if isinstance(data, str) else data if isinstance(data, Sequence) else ():
        source = entry.get("id") if isinstance(entry, Mapping) else entry
        if isinstance(source, str):
            yield source


def _list_models(recipe: Any, setting: str) -> list[str]:
    """What a setting names as text: a model, or several by name."""
    named = _select(recipe, setting)
    return [each for each in (named.values() if isinstance(named, Mapping) else [named]) if isinstance(each, str)]


def _select(recipe: Any, path: str) -> Any:
    """The setting, None where the recipe has none of that name."""
    for name in path.split("."):
        recipe = None if recipe is None else vars(recipe).get(name)
    return recipe
