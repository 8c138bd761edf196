"""A recipe resolved from arguments: built-in values, the algorithm's settings, a recipe file, then
`key=value` overrides.

Overrides follow Hydra's grammar (`trainer.lr=1e-4`, `task.args.digits=7`,
`+algorithm_args.ratio_clip=2.0`). Later layers win; an unknown key is an error that suggests the
nearest.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ludic.data.sources import list_task_folders
from ludic.errors import ConfigError, did_you_mean
from ludic.launch.rank_environment import read_rank_environment
from ludic.recipes.environments import check_environments
from ludic.recipes.flat_recipe import KNOWN, from_flat, is_flat, translate_name
from ludic.recipes.overrides import (
    RENAMED,
    SECTIONS_BY_NAME,
    Override,
    check_plain,
    check_yaml,
    first_line,
    parse_override,
    suggest,
)
from ludic.recipes.processes import needs_launcher
from ludic.recipes.rules import check_settings
from ludic.recipes.schema import AUTO, Recipe, make_trainer_section

logger = logging.getLogger(__name__)

_OPEN_SECTIONS = (
    *(
        "task.args",
        "curriculum.args",
        "algorithm_args",
        "reward_model_args",
        "report_args",
        "chat_template_kwargs",
        "model_init_kwargs",
    ),
    *("data", "reward", "eval_reward", "process_reward", "environments", "teacher.model", "teacher.url"),
)
"""Their keys are checked by what takes them as arguments."""
_PER_ALGORITHM, LOADED_MODEL = "per_algorithm", "loaded_model"  # keys of files, whose content replaces other keys

_BUILTIN = files("ludic.recipes") / "builtin"
COMMANDS = ("train", "sft", "dpo", "train-rm")
"""Commands that have built-in recipes."""
_NO_RESULTS = (
    "name",
    "output",
    "report_to",
    "report_args",
    "report_header",
    "report_aliases",
    "ranks",
    "place",
    "callbacks",
    "profile",
)
"""Settings that change no result."""


def list_builtin_recipes(command: str = "train") -> list[str]:
    """Names of the recipes of a command that come with the library."""
    return sorted(path.name.removesuffix(".yaml") for path in _find_builtin(command).iterdir() if path.name.endswith(".yaml"))


def _find_builtin(command: str) -> Any:
    return _BUILTIN if command == "train" else _BUILTIN / command


def compose(arguments: Sequence[str] = (), *, ranks: int | None = None) -> Recipe:
    """Resolve a recipe of `ludic train`. `arguments` are at most one recipe name or YAML file,
    and any number of overrides. `ranks`: processes that train, for the batch of a flat file; 0 if
    not known yet. None means the ranks of this process's environment, else `place.trainers`."""
    source, overrides = split_arguments(arguments)
    if ranks is None:
        environment, given = read_rank_environment(), flatten(overrides).get("place.trainers")
        ranks = environment.world_size if environment is not None else given if isinstance(given, int) else 1
    user, overrides = _read_file(source, overrides, ranks)
    layers = list(_read_layers(source, user, overrides))
    file = {path: OmegaConf.select(layer, path) for where, layer in layers if where == source for path in _list_paths(layer)}
    recipe = cast(Recipe, resolve_layers(deepcopy(_make_schema()), layers, overrides))
    if recipe.place.servers and recipe.inference.kind is None:
        recipe.inference.kind = "vllm"
    check_settings(recipe)
    check_environments(recipe)
    choose_phases(recipe, [file if _is_file(source) else {}, flatten(overrides)])
    return recipe


def split_arguments(arguments: Sequence[str | Override]) -> tuple[str | None, list[Override]]:
    """(recipe or file, overrides in order). Parsed overrides pass through."""
    sources: list[str] = []
    overrides: list[Override] = []
    for argument in arguments:
        if isinstance(argument, Override):
            overrides.append(argument)
        elif "=" not in argument or (_is_file(argument) and Path(argument).is_file()):
            sources.append(argument)
        else:
            overrides.append(parse_override(argument))
    if len(sources) > 1:
        raise ConfigError(f"one recipe at a time, not {' and '.join(sources)}; a setting is written key=value")
    return (sources[0] if sources else None), overrides


def resolve_layers(tree: DictConfig, layers: Iterable[tuple[str, DictConfig]], overrides: Sequence[Override]) -> Any:
    """Merge the layers into `tree`, lowest first, then the overrides; returns the object that
    the tree describes. Each layer has a name for errors. In a recipe for a launcher `auto` remains
    the device, which is for the processes to choose (`choose_devices`)."""
    for where, layer in layers:
        _merge(tree, layer, where)
    _drop_arguments_of_other_task(tree, next((o.value for o in overrides if o.key == "task.kind"), tree.task.kind))
    known = _list_paths(tree)
    for override in overrides:
        _check_key(override.key, known)
        try:
            OmegaConf.update(tree, override.key, override.value, merge=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{override.text}: {first_line(error)}") from error
        if isinstance(override.value, Mapping):  # it may have filled a section that was empty
            known = _list_paths(tree)
    check_plain(OmegaConf.to_container(tree, resolve=False), "")
    recipe: Any = OmegaConf.to_object(tree)
    if not needs_launcher(recipe.place) and not _LEFT_OPEN.get():
        choose_devices(recipe)
    return recipe


def to_yaml(recipe: Any) -> str:
    """The resolved recipe as YAML that its command reads. `loaded_model: null` makes it hold for
    any `model`."""
    whole = {LOADED_MODEL: None} if isinstance(recipe, Recipe) else {}
    return OmegaConf.to_yaml(OmegaConf.create({**asdict(recipe), **whole}))


def to_plain_values(recipe: Any) -> dict[str, Any]:
    """The recipe in plain JSON values."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(recipe), default=str))
    return values


def config_hash(recipe: Any, *, schedule_steps: int | None = None) -> str:
    """16 hex digits over all settings that can change results: all but `name`, `output`, those
    that begin with `report_`, `ranks`, callbacks that end no run, and where processes run. A device
    that is left to the processes of a run counts as the one of this machine. `schedule_steps`:
    length of the learning-rate schedule, if it decays in fewer steps than the run now has."""
    recipe = deepcopy(recipe)
    choose_devices(recipe)
    content = {key: value for key, value in asdict(recipe).items() if key not in _NO_RESULTS}
    if isinstance(recipe, Recipe):
        content["place"] = {"actors": recipe.place.actors, "restarts": recipe.place.restarts}
    if recipe.callbacks.stop.metric is not None or recipe.callbacks.own:
        content["callbacks"] = {"stop": asdict(recipe.callbacks.stop), "own": recipe.callbacks.own}
    if isinstance(recipe, Recipe) and recipe.callbacks.guard.ess is not None:
        content["guard"] = asdict(recipe.callbacks.guard)
    if schedule_steps is not None:
        content["schedule_steps"] = schedule_steps
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def list_settings() -> list[str]:
    """The full paths of all settings of `ludic train`."""
    return _list_paths(_make_schema())


def _is_file(source: str | None) -> bool:
    return source is not None and source.endswith((".yaml", ".yml"))


@cache
def _make_schema() -> DictConfig:
    """To be copied before it is changed, which takes a fifth of the time."""
    tree = cast(DictConfig, OmegaConf.structured(Recipe))
    tree.trainer = OmegaConf.structured(make_trainer_section())
    tree.warmup.trainer = OmegaConf.structured(make_trainer_section())
    return tree


@cache
def _warn_once(text: str) -> None:
    """Warn in the first of several times that a command composes its recipe."""
    logger.warning(text)


def _read_file(source: str | None, overrides: list[Override], ranks: int) -> tuple[DictConfig, list[Override]]:
    """The user's file, empty without one, and the overrides that are not part of it: those with
    names of a flat file replace its keys before it is translated."""
    if not _is_file(source):
        return OmegaConf.create({}), overrides
    content = read_yaml(Path(cast(str, source)).expanduser())
    plain = cast(dict[str, Any], OmegaConf.to_container(content, resolve=False))
    if not is_flat(plain):
        return content, overrides
    own = {override.key: name for override in overrides if (name := translate_name(override.key)) in KNOWN}
    translated = from_flat(plain, replaced={own[o.key]: o.value for o in overrides if o.key in own}, ranks=ranks)
    for key, reason in translated.without_effect.items():
        _warn_once(f"{source}: {key} has no effect here: {reason}")
    return OmegaConf.create(translated.recipe), [override for override in overrides if override.key not in own]


def _read_layers(source: str | None, user: DictConfig, overrides: Sequence[Override]) -> Iterator[tuple[str, DictConfig]]:
    """The layers of a recipe, lowest first: the built-in recipes, each with its settings for the
    algorithm and for a loaded model, then the user's file with its own. In a file with
    `loaded_model: null` no settings depend on the model."""
    overridden = {override.key: override.value for override in overrides}
    is_file = _is_file(source)
    kind = overridden.get("task.kind", OmegaConf.select(user, "task.kind"))
    has_rows = any(layer.get(key) is not None for layer in (overridden, user) for key in ("data", "reward", "environments"))
    default = "data" if has_rows or kind == "reasoning_gym" else "sort"  # for a pretrained model
    data = overridden.get("data", user.get("data"))
    if kind == "harbor" or (kind is None and isinstance(data, str) and list_task_folders(data)):
        default = "harbor"
    base_name = overridden.get("recipe", user.get("recipe", default) if is_file else source or default)
    layers = [*_read_bases(str(base_name)), (str(source), user)]
    given = [overridden, *(layer for _, layer in reversed(layers))]
    algorithm, model = (next(layer[key] for layer in given if key in layer) for key in ("algorithm", "model"))
    replaces = model is not None and user.get(LOADED_MODEL, {}) is not None
    for where, layer in layers:
        by_algorithm, loaded = layer.pop(_PER_ALGORITHM, {}), layer.pop(LOADED_MODEL, OmegaConf.create({}))
        yield where, layer
        yield f"{where}, {_PER_ALGORITHM}.{algorithm}", by_algorithm.get(algorithm, OmegaConf.create({}))
        if replaces:
            yield f"{where}, {LOADED_MODEL}", loaded


def _read_bases(name: str) -> Iterator[tuple[str, DictConfig]]:
    """The built-in recipe `name`, before it those that it begins with, and the defaults first. Its
    key `recipe` names the next one, as in a user's file."""
    layer = deepcopy(read_builtin(name))
    if layer.recipe != name:
        yield from _read_bases(layer.recipe)
    else:
        yield "defaults", read_defaults("train")
    layer.recipe = name
    yield f"recipe {name}", layer


@cache
def read_builtin(name: str, command: str = "train") -> DictConfig:
    """To be copied before it is changed. Raises ConfigError for a name that `command` does not
    have, and names the command that has it."""
    if name not in (known := list_builtin_recipes(command)):
        remedy = did_you_mean(name, known, f"there are {', '.join(known)}; a file's name ends in .yaml", count=2)
        if "/" in name:
            remedy += ", and there is no such folder of a run"
        if others := [f"ludic {other} {name}" for other in COMMANDS if name in list_builtin_recipes(other)]:
            remedy = f" of ludic {command}; there is {' and '.join(others)}"
        raise ConfigError(f"there is no recipe {name!r}{remedy}")
    return cast(DictConfig, OmegaConf.create((_find_builtin(command) / f"{name}.yaml").read_text(encoding="utf-8")))


def read_defaults(command: str) -> DictConfig:
    """The settings that the recipes of a command have in common, as they are before any other."""
    names = ("all", command) if command == "train" else ("all", "epochs", command)
    texts = ((files("ludic.recipes") / "defaults" / f"{name}.yaml").read_text(encoding="utf-8") for name in names)
    return cast(DictConfig, OmegaConf.merge(*map(OmegaConf.create, texts)))


def read_yaml(path: Path) -> DictConfig:
    import yaml  # type: ignore[import-untyped]

    if not path.is_file():
        raise ConfigError(f"recipe file {path} does not exist; built-in recipes are {', '.join(list_builtin_recipes())}")
    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text, str(path))
        content = OmegaConf.load(StringIO(text))
    except ConfigError:
        raise
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        lines = [line.strip() for line in str(error).splitlines() if not line.startswith("    ")]  # without the excerpt
        raise ConfigError(f"recipe file {path} is not YAML: {' '.join(lines)}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError(f"recipe file {path} must hold keys and values, not a list")
    check_plain(OmegaConf.to_container(content, resolve=False), "")
    _read_off(content)
    if (path.parent / "progress.json").is_file():  # an older version of the library may have written it
        for former, name in RENAMED.items():
            section, _, leaf = former.rpartition(".")
            node = OmegaConf.select(content, section)
            if isinstance(node, DictConfig) and leaf in node:
                node[name.rpartition(".")[2]] = node.pop(leaf)
    return content


def _read_off(content: DictConfig) -> None:
    """Make `prefix_sharing: off` the word that it is: in YAML 1.1 a bare `off` is false."""
    for key, value in content.items():
        if isinstance(value, DictConfig):
            _read_off(value)
        elif key == "prefix_sharing" and value is False:
            content[key] = "off"


def _merge(tree: DictConfig, layer: DictConfig, where: str) -> None:
    for name, field in SECTIONS_BY_NAME.items():
        if isinstance(layer.get(name), str):
            layer[name] = {field: layer[name]}
    known = _list_paths(tree)
    for key in _list_paths(layer):
        _check_key(key, known, f"{where}: ")
    try:
        _drop_arguments_of_other_task(tree, OmegaConf.select(layer, "task.kind"))
        tree.merge_with(layer)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {first_line(error)}") from error


def _drop_arguments_of_other_task(tree: DictConfig, kind: Any) -> None:
    """Drop the task's arguments if the kind of task changes."""
    if kind is not None and not OmegaConf.is_missing(tree.task, "kind") and kind != tree.task.kind:
        tree.task.args = {}


def _check_key(key: str, known: Sequence[str], where: str = "") -> None:
    if key not in known and not key.startswith(tuple(f"{section}." for section in _OPEN_SECTIONS)):
        raise ConfigError(f"{where}there is no setting {key!r}{suggest(key, known)}")


def _list_paths(tree: Any, prefix: str = "") -> list[str]:
    """The full paths of all keys, sections included; open sections are not entered."""
    section: Any = OmegaConf.to_container(tree) if isinstance(tree, DictConfig) else tree
    paths: list[str] = []
    for key, value in section.items():
        paths.append(f"{prefix}{key}")
        if isinstance(value, Mapping) and paths[-1] not in _OPEN_SECTIONS:
            paths += _list_paths(value, f"{paths[-1]}.")
    return paths


def flatten(overrides: Sequence[Override]) -> dict[str, Any]:
    """The values of overrides by path. Example: `warmup={steps:5}` gives `warmup.steps` too."""
    values: dict[str, Any] = {}
    for override in overrides:
        values[override.key] = override.value
        if isinstance(override.value, Mapping):
            values |= {f"{override.key}.{key}": value for key, value in override.value.items()}
    return values


_EXCLUDED: dict[str | None, Sequence[str]] = {
    "sft": ("steps",),
    "rl": ("warmup.steps", "warmup.data", "warmup.epochs"),
    "sft+rl": (),
}
"""Mode -> the settings of the phase that it leaves out."""


def has_warmup(recipe: Recipe) -> bool:
    return bool(recipe.warmup.steps or recipe.warmup.data)


def choose_phases(recipe: Recipe, said: Sequence[Mapping[str, Any]]) -> None:
    """Leave out the phase that `mode` leaves out. `said` are the settings of the user, first of the
    file and then of the command line. A setting that the mode leaves out is an error, unless it is
    in the file and the mode on the command line.

    Example: `steps: 120` in a file and `mode=sft` on the command line give `steps=0`; `mode: sft`
    in a file and `steps=120` on the command line are an error.
    """
    mode = recipe.mode
    for place in said:
        is_last = place is said[-1]
        for key in _EXCLUDED.get(mode, ()):
            if (is_last or place.get("mode") is not None) and place.get(key):
                raise ConfigError(f"mode={mode} leaves out {key}={place[key]}; drop one of them, or use mode=sft+rl")
    if mode == "sft":
        recipe.steps = 0
    if mode == "rl":
        recipe.warmup.steps, recipe.warmup.data, recipe.warmup.epochs = 0, None, None
    if mode in ("sft", "sft+rl") and not has_warmup(recipe):
        raise ConfigError(f"mode={mode} needs demonstrations; set warmup.data=FILE, or warmup.steps=N for those of the task")
    if mode in ("rl", "sft+rl") and not recipe.steps:
        raise ConfigError(f"mode={mode} needs steps of reinforcement; set steps=N, or mode=sft")
    if recipe.warmup.epochs is not None:  # passes replace the steps of a built-in recipe
        if recipe.warmup.steps and any(place.get("warmup.steps") for place in said):
            raise ConfigError(f"set only one of warmup.epochs={recipe.warmup.epochs} and warmup.steps={recipe.warmup.steps}")
        recipe.warmup.steps = 0


DEVICE_SETTINGS = ("trainer.model_device", "warmup.trainer.model_device")
_LEFT_OPEN: ContextVar[bool] = ContextVar("_LEFT_OPEN", default=False)


@contextmanager
def devices_left_open() -> Iterator[None]:
    """Inside the block, a recipe that is composed keeps `auto`, and torch is not imported for it.
    Who opens the block chooses afterwards."""
    token = _LEFT_OPEN.set(True)
    try:
        yield
    finally:
        _LEFT_OPEN.reset(token)


def choose_devices(recipe: Any) -> None:
    """Replace `auto` by the device of this process, in place. A command that trains does this; one
    that only starts the processes of a run leaves it to them, since they may be on machines of
    another kind."""
    trains_before = "warmup" in vars(recipe) and "trainer" in vars(recipe.warmup)
    sections = [recipe.trainer, *([recipe.warmup.trainer] if trains_before else [])]
    for section in sections:
        if section.model_device == AUTO:
            import torch

            section.model_device = "cuda" if torch.cuda.is_available() else "cpu"
