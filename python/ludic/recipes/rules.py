"""Rules of single settings: `setting` states them next to the default, and `check_settings` applies
them to a whole recipe. Rules between settings that these cannot express are functions `check_...`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT, Field, field, fields, is_dataclass
from functools import reduce
from typing import Any, Unpack

from omegaconf import MISSING

from ludic.errors import ConfigError, Rules as ValueRules, find_broken_rule


class Rules(ValueRules, total=False):
    """The rules of a setting. Null is always allowed.

    `needs` and `excludes` are conditions on other settings, separated by ` or `: `place.on=ray` is
    true for that value, `queue.url` for every value but the default. They apply to a setting that
    is not at its default.
    """

    relation: str
    """What it must be compared with another setting, unless that is null: `a multiple of
    place.nodes`."""
    needs: str
    """It may be set only if one of these conditions is true."""
    excludes: str
    """It may be set only if none of these conditions is true."""
    hint: str
    """A remedy or reason that ends an error. A setting with `needs` or `excludes` has it for errors
    about these, not about its bounds."""


_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "at most": operator.le,
    "more than": operator.gt,
    "a multiple of": lambda value, other: other == 0 or value % other == 0,  # 0 breaks a rule of the other one
    "a divisor of": lambda value, other: other % value == 0,
}


def setting(default: Any = MISSING, **rules: Unpack[Rules]) -> Any:
    """A field of a section with this default. Without one a file has the value."""
    return field(default=default, metadata=rules)


def check_settings(recipe: Any) -> None:
    """Raise `ConfigError` for the first setting of a recipe, in the order of its sections, that
    breaks a rule: first of its own value, then towards another setting, whose value is then known
    to be possible. The message names the setting, its value, the rule and the remedy."""
    for find in (_find_own_problem, _find_problem):
        for path, item, value in _list_settings(recipe, ""):
            problem = find(recipe, path, item, value)
            if problem is not None:
                raise ConfigError(f"{path} ({value}) {problem}")


def _list_settings(section: Any, prefix: str) -> Iterator[tuple[str, Field[Any], Any]]:
    """(path, field, value) of each setting that has rules and is not null."""
    for item in fields(section):
        value, path = getattr(section, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from _list_settings(value, f"{path}.")
        elif item.metadata and value is not None:
            yield path, item, value


def _hint(rules: Mapping[Any, Any]) -> str:
    return f"; {rules['hint']}" if "hint" in rules else ""


def _find_own_problem(recipe: Any, path: str, item: Field[Any], value: Any) -> str | None:
    rules = item.metadata
    broken = find_broken_rule(value, **{name: rule for name, rule in rules.items() if name in ValueRules.__annotations__})
    own_hint = "choices" in rules or not rules.keys() & {"needs", "excludes"}
    return broken and f"{broken}{_hint(rules) if own_hint else ''}"


def _find_problem(recipe: Any, path: str, item: Field[Any], value: Any) -> str | None:
    rules, hint = item.metadata, _hint(item.metadata)
    relation, _, other_path = rules.get("relation", "").rpartition(" ")
    compared = reduce(getattr, other_path.split("."), recipe) if relation else None
    if compared is not None and not _RELATIONS[relation](value, compared):
        return f"must be {relation} {other_path} ({compared})"
    if value == _default(item):
        return None
    if "needs" in rules and not any(_is_true(recipe, each) for each in rules["needs"].split(" or ")):
        return f"needs {rules['needs']}; set that too, or leave {path} out{hint}"
    for other in rules["excludes"].split(" or ") if "excludes" in rules else ():
        if _is_true(recipe, other):
            return f"does not go together with {other}; leave one of them out{hint}"
    return None


def _is_true(recipe: Any, condition: str) -> bool:
    path, has_value, wanted = condition.partition("=")
    *sections, name = path.split(".")
    section = reduce(getattr, sections, recipe)
    value = getattr(section, name)
    return str(value) == wanted if has_value else value != next(_default(item) for item in fields(section) if item.name == name)


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is NO_DEFAULT else item.default_factory()
