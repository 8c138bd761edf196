"""Python objects as settings of a recipe: rows become a file, and functions get names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any

from ludic.agents.tool_agent import Tool, check_tool
from ludic.data.row_images import intern_row
from ludic.errors import ConfigError, ConfigTypeError
from ludic.files.json_values import encode_lines
from ludic.files.jsonl import write_jsonl
from ludic.images.store import ImageStore
from ludic.recipes.overrides import Override, make_override
from ludic.training.judge import Judge, JudgeSettings
from ludic.training.reward_functions import needed_columns, reward_names

Rows = str | PathLike[str] | Mapping[str, Any] | Iterable[Mapping[str, Any]]
"""A file, a folder, a hub id or a mixture as in the setting `data`; or rows: a list of mappings, or
a data set of the `datasets` library."""
TaskSetting = type | str | Mapping[str, Any]
"""A class, its name as in the setting `task.kind`, or the section `task`."""
Rewards = str | Callable[..., Any] | Sequence[str | Callable[..., Any]]
"""Functions `reward(prompts, completions, **columns) -> list of floats`, names as in the setting
`reward`, or a list of these."""
Tools = str | Callable[..., Any] | Sequence[str | Callable[..., Any]]
"""Functions with type hints and docstrings, names as in the setting `tools`, or a list of these."""


def source_of(data: Rows, folder: Path, *, rewards: Rewards = ()) -> Any:
    """The setting `data`. Rows are written to `folder` under a name that follows from their
    content, so that the same rows are the same data, and their images to `images` in it. Raises
    ConfigTypeError for anything else, and ConfigError for rows that lack a column which one of the
    functions `rewards` asks for."""
    if isinstance(data, str | PathLike):
        return str(data)
    if isinstance(data, Mapping):
        return dict(data)
    if not isinstance(data, Iterable):
        raise ConfigTypeError(f"the data ({type(data).__name__}) must be a path, a hub id, or rows: an iterable of mappings")
    rows, images = [], ImageStore(folder / "images")
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise ConfigTypeError(f"row {number} of the data is {type(row).__name__}; every row must be a mapping of columns")
        rows.append(intern_row(dict(row), Path.cwd(), f"row {number} of the data", images))
    if not rows:
        raise ConfigError("the data has no rows")
    for reward in _listed(rewards):
        if not isinstance(reward, str):
            _check_columns(reward, rows)
    digest = sha256()
    for line in encode_lines(rows):
        digest.update(line)
    path = folder / f"{digest.hexdigest()[:16]}.jsonl"
    if not path.is_file():
        write_jsonl(path, rows)
    return str(path)


def task_of(task: TaskSetting | None, dataset: Rows | None, rewards: Rewards | None) -> tuple[dict[str, Any], dict[str, type]]:
    """The settings of the task, empty without one, and its class if only this process knows it, as
    `name_rewards` does it. Raises ConfigError if there is neither a task nor rows, and for rows or
    reward functions next to a task object, which has both."""
    section = dict(task) if isinstance(task, Mapping) else {}
    if dataset is None and (task is None or (isinstance(task, Mapping) and "kind" not in section)):
        raise ConfigError("there is nothing to train on; give reward functions and rows, or task= with a class of your own")
    if task is None or (dataset is not None and isinstance(task, Mapping)):
        return {"task": section} if section else {}, {}
    if dataset is not None or rewards is not None:
        raise ConfigError("a task has its own problems and rewards; leave task= out, or the reward functions and the rows")
    if section:
        return {f"task.{name}": value for name, value in section.items()}, {}
    if isinstance(task, str):
        return {"task.kind": task}, {}
    if not isinstance(task, type):
        raise ConfigTypeError(f"task ({type(task).__name__}) must be a class, or its module:Class")
    name = _name(task)
    return {"task.kind": name}, {} if ":" in name else {name: task}


def environments_of(environments: Mapping[str, Any] | None, folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The setting `environments`, in which `data`, `reward`, `tools` and `task` may be objects, and
    those that only this process knows, by kind."""
    named, own = dict[str, Any](), {"reward": dict[str, Any](), "tool": dict[str, Any](), "task": dict[str, Any]()}
    for name, given in (environments or {}).items():
        settings = dict(given)
        if "reward" in settings:
            settings["reward"], found = name_rewards(settings["reward"])
            own["reward"] |= found
        if "tools" in settings:
            settings["tools"], tools = name_tools(settings["tools"])
            own["tool"] |= tools
        if "data" in settings:
            settings["data"] = source_of(settings["data"], folder, rewards=given.get("reward", ()))
        if isinstance(settings.get("task"), str | type):
            section, task = task_of(settings["task"], None, None)
            settings["task"], own["task"] = {"kind": section["task.kind"]}, own["task"] | task
        named[name] = as_plain(settings)
    return named, own


def name_rewards(rewards: Rewards) -> tuple[list[str], dict[str, Callable[..., Any]]]:
    """The setting `reward`, and its functions that only this process knows, such as functions of a
    notebook or a script: they have their own name. Another process can import the others, which are
    named by their module. Raises ConfigError for a name that is taken."""
    names, own = _name_all(rewards, "reward functions")
    for name in own:
        if name in reward_names():
            raise ConfigError(f"there is a reward {name!r} already; give your function another name with def")
    return names, own


def take_judge(rewards: Rewards | None) -> tuple[Rewards | None, dict[str, Any]]:
    """The rewards, of which a `Judge` is the name `judge`, and its settings: as the section `judge`
    of the recipe they are known to every process of the run, and when it is resumed."""
    listed = [] if rewards is None else _listed(rewards)
    judge = next((each for each in listed if type(each) is Judge), None)
    if judge is None:
        return rewards, {}
    default = vars(JudgeSettings())
    settings = {f"judge.{name}": as_plain(getattr(judge, name)) for name in default if getattr(judge, name) != default[name]}
    return ["judge" if each is judge else each for each in listed], settings


def name_tools(tools: Tools) -> tuple[list[str], dict[str, Tool]]:
    """The setting `tools`, and its functions that only this process knows, as
    `name_rewards` does it. Raises ConfigError for functions that a model cannot be told of."""
    for tool in _listed(tools):
        if not isinstance(tool, str):
            check_tool(tool)
    return _name_all(tools, "tools")


def name_agent(agent: str | Callable[..., Any]) -> tuple[str, dict[str, Callable[..., Any]]]:
    """The setting `agent.function`, and its function if only this process knows it. Raises
    ConfigTypeError for a class."""
    if isinstance(agent, type):
        raise ConfigTypeError(f"agent ({agent.__name__}) is a class; give a function of a session, or a command as a list")
    [name], own = _name_all(agent, "agents")
    return name, own


def _name_all(objects: Rewards | Tools, kind: str) -> tuple[list[str], dict[str, Any]]:
    """The names of all, and those that only this process knows. Raises ConfigError if two have the
    same name."""
    listed = _listed(objects)
    names = [each if isinstance(each, str) else _name(each) for each in listed]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"two {kind} have the name {twice[0]!r}, which tells them apart; rename one")
    return names, {name: each for name, each in zip(names, listed, strict=True) if not isinstance(each, str) and ":" not in name}


def _listed(rewards: Rewards) -> Sequence[Any]:
    return [rewards] if isinstance(rewards, str) or callable(rewards) else rewards


def _check_columns(function: Callable[..., Any], rows: Sequence[Mapping[str, Any]]) -> None:
    for column in needed_columns(function):
        for number, row in enumerate(rows):
            if column not in row:
                raise ConfigError(
                    f"row {number} of the data has no {column}, which reward {_own_name(function)} asks for; write None there "
                    f"(its columns: {', '.join(row)})"
                )


def _name(function: Any) -> str:
    if not callable(function):
        raise ConfigTypeError(f"a reward ({type(function).__name__}) must be a function, or a name such as rewards:exact")
    name = _own_name(function)
    module = str(getattr(function, "__module__", ""))
    if module not in ("", "__main__", "builtins"):
        with suppress(Exception):  # of a module that was made by hand, or that cannot be imported again
            if getattr(importlib.import_module(module), name, None) is function:
                return f"{module}:{name}"
    return "reward" if name == "<lambda>" else name


def _own_name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def overrides_of(settings: Mapping[str, Any]) -> list[Override]:
    """Settings as overrides of a recipe: `{"steps": 5, "trainer": {"lr": 1e-5}}`, or with the whole
    path as key: `{"trainer.lr": 1e-5}`."""
    overrides = []
    for key, value in settings.items():
        plain = as_plain(value)
        overrides.append(make_override(key, plain, text=f"{key}={plain}"))
    return overrides


def as_plain(value: Any) -> Any:
    """As a recipe's file has it: paths are text, and what numpy or torch made is numbers."""
    if isinstance(value, Mapping):
        return {name: as_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(inner) for inner in value]
    if hasattr(value, "tolist") and not isinstance(value, type):
        return value.tolist()
    return str(value) if isinstance(value, PathLike) else value
