"""The settings of a command line: what stands for a recipe in it, and the output of
`--print-config`, YAML with the docstring of each field as a comment above it."""

from __future__ import annotations

import ast
import inspect
import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from ludic.errors import ConfigError
from ludic.recipes.compose import choose_devices, compose, split_arguments, to_yaml
from ludic.recipes.schema import Recipe

_WIDTH = 100


def add_named_recipe(arguments: Sequence[str], resume: Path | None) -> Sequence[str]:
    """The arguments, before them the file that `GRPO_RECIPE` names if they name no recipe."""
    named = os.environ.get("GRPO_RECIPE")
    return [named, *arguments] if named and resume is None and split_arguments(arguments)[0] is None else arguments


def expand_run_folder(argument: str) -> list[str]:
    """For the folder of a run: the arguments that give its recipe with the trained model. Any
    other argument is returned as it is. Raises ConfigError for a run without a task or without a
    model yet."""
    folder = Path(argument)
    if not (folder / "config.yaml").is_file():
        return [argument]
    command = "train"
    with suppress(OSError, ValueError, AttributeError):
        command = json.loads((folder / "progress.json").read_text(encoding="utf-8")).get("command", command)
    if command in ("sft", "dpo"):
        raise ConfigError(f"{folder} is a run of `ludic {command}`, which has no task; say which, such as: sort model={folder}")
    if command == "train-rm":
        raise ConfigError(f"{folder} is a reward model, measured in {folder / 'summary.json'}; set reward_model={folder}")
    if not (folder / "model").is_dir():
        raise ConfigError(f"{argument} has no model yet; resume it with `ludic train --resume {argument}`")
    saved = [f"{name}=null" for name in ("tokenizer", "chat_template", "eos_token", "name")]  # the model's folder has them
    return [str(folder / "config.yaml"), f"model='{folder / 'model'}'", *saved]


def read_recipe_with_model(arguments: Sequence[str]) -> Recipe:
    """The recipe of the arguments, of which one may be a run's folder, for this machine. Raises
    ConfigError if it has no model."""
    recipe = compose([part for argument in arguments for part in expand_run_folder(argument)])
    choose_devices(recipe)
    if recipe.model is None:
        raise ConfigError("there is no model to play with; give model=DIRECTORY or a hub id, such as the model/ of a run")
    return recipe


def format_recipe(recipe: Any) -> str:
    """The whole recipe as YAML, every setting with its help text."""
    return add_help_texts(to_yaml(recipe), type(recipe), recipe.trainer.config_class)


def add_help_texts(text: str, recipe: type[Any], trainer: type[Any] | None = None) -> str:
    """Add help texts to `text`, the YAML of a `recipe` in block style. `trainer` is the class of
    its `trainer` sections. The values stay the same."""
    docs = dict(_find_help_texts(recipe, trainer, ""))
    lines, path = [], list[str]()
    for line in text.splitlines():
        stripped = line.lstrip(" ")
        key, separator, _ = stripped.partition(":")
        depth = (len(line) - len(stripped)) // 2
        if separator and key.isidentifier() and depth <= len(path):
            path = [*path[:depth], key]
            doc = docs.get(".".join(path))
            if doc is not None:
                margin = f"{line[: len(line) - len(stripped)]}# "
                lines += textwrap.wrap(doc, _WIDTH, initial_indent=margin, subsequent_indent=margin)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _find_help_texts(section: type[Any], trainer: type[Any] | None, prefix: str) -> Iterator[tuple[str, str]]:
    """(path of a setting, help text)."""
    docs, hints = read_field_docs(section), get_type_hints(section)
    for item in fields(section):
        if item.name in docs:
            yield f"{prefix}{item.name}", docs[item.name]
        inner = trainer if item.name == "trainer" and trainer is not None else hints[item.name]
        if is_dataclass(inner) and inner is not section:
            yield from _find_help_texts(inner, trainer, f"{prefix}{item.name}.")


def read_field_docs(section: type[Any]) -> dict[str, str]:
    """The docstring under each field of a class and its base classes, on one line each."""
    docs: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if is_dataclass(base):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(body, ast.ClassDef)
            docs |= dict(_find_docstrings(body.body))
    return docs


def _find_docstrings(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for statement, following in pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            yield statement.target.id, " ".join(following.value.value.split())
