"""The settings of each command as tables: name, value of the built-in recipe, help text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

import yaml

from ludic.cli.evaluate import EvalSettings
from ludic.cli.settings import read_field_docs
from ludic.recipes.compose import compose, list_builtin_recipes, to_plain_values
from ludic.recipes.epochs_schema import compose_dpo, compose_rm, compose_sft


@cache
def write_settings_pages() -> dict[str, str]:
    """Path -> text."""
    recipes = {"train": compose(["sort"]), "sft": compose_sft([]), "train-rm": compose_rm([]), "dpo": compose_dpo([])}
    pages = {f"settings/{name}.md": write_page(f"ludic {name}", recipe) for name, recipe in recipes.items()}
    own = "\n".join(_write_table(EvalSettings, vars(EvalSettings()), ""))
    note = "All settings of [ludic train](train.md), and:"
    return pages | {"settings/eval.md": f"# Settings of ludic eval\n\n{note}\n\n{own}\n"}


def write_page(command: str, recipe: Any) -> str:
    trainer = recipe.trainer.config_class
    values = to_plain_values(recipe)
    builtin = ", ".join(f"`{name}`" for name in list_builtin_recipes() if name != "sort")
    about = (
        f"Set on the command line as `{command} name=value`, `{command} section.name=value`, or in a YAML file;\n"
        f"`{command} --print-config` prints what a run would have. The values below are "
    )
    about += f"those of the recipe `sort`; others are {builtin}." if command == "ludic train" else "the defaults."
    return "\n".join([f"# Settings of {command}", "", about, "", *_write_section(type(recipe), trainer, values, "")]) + "\n"


def _write_section(section: type[Any], trainer: type[Any], values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """A table of the settings of `section`, then the sections in it."""
    yield from _write_table(section, values, prefix)
    hints = get_type_hints(section)
    for item in fields(section):
        inner = trainer if item.name == "trainer" else hints[item.name]
        value = values.get(item.name)
        if is_dataclass(inner) and isinstance(value, Mapping):
            yield from ["", f"## {prefix}{item.name}", ""]
            about = read_field_docs(section).get(item.name) or _first_paragraph(inner)
            yield from [about, ""] if about else []
            yield from _write_section(inner, trainer, value, f"{prefix}{item.name}.")


def _write_table(section: type[Any], values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    docs = read_field_docs(section)
    plain = [item.name for item in fields(section) if item.name in values and not _is_section(section, item.name, values)]
    if plain:
        yield from ["| setting | value | meaning |", "|---|---|---|"]
    for name in plain:
        yield f"| `{prefix}{name}` | `{_escape(_one_line(values[name]))}` | {_escape(docs.get(name, ''))} |"


def _is_section(section: type[Any], name: str, values: Mapping[str, Any]) -> bool:
    return name == "trainer" or (is_dataclass(get_type_hints(section)[name]) and isinstance(values[name], Mapping))


def _first_paragraph(section: type[Any]) -> str:
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def _one_line(value: Any) -> str:
    """YAML on one line, as a table needs it: a text with line breaks is quoted with \\n."""
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, default_style=style)
    return text.removesuffix("...\n").strip()


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
