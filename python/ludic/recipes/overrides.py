"""Overrides of settings: `key=value` in Hydra's grammar, short and former names, and what an error
about an unknown name suggests.

Limits on files of settings: their size, aliases and references.

With aliases a few lines can stand for billions of values or contain themselves. OmegaConf's
`${...}` can do the same, or copy an environment variable into the config.yaml of a run. Values are
therefore counted before any is built, and `${...}` is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ludic.errors import ConfigError
from ludic.recipes.foreign_names import explain
from ludic.recipes.place_section import SHORT_FORMS, parse_place

SECTIONS_BY_NAME = {"inference": "kind", "sharding": "kind", "reference": "source", "quantization": "kind"}
"""Sections that can be set to one word, which is the value of this field: `inference=vllm`."""

_SHORT_NAMES = {**SHORT_FORMS, "log": "report_to"}

RENAMED = {"inference.max_lag": "inference.batches_ahead"}
"""Former name of a setting -> its name. The config.yaml of a run may have either."""


@dataclass(frozen=True)
class Override:
    """One `key=value`, parsed."""

    key: str
    value: Any
    text: str


def parse_override(text: str) -> Override:
    """Parse one override of the command line. Sweeps and deletions are rejected: one command starts
    one run."""
    try:
        text.encode()
        parsed = OverridesParser.create().parse_override(text)
    except UnicodeEncodeError as error:
        raise ConfigError(f"override {text!a} is not text in UTF-8") from error
    except (HydraException, ValueError, RecursionError) as error:
        if not isinstance(error, HydraException):
            raise ConfigError(f"override {text[:60]!r} cannot be read: {first_line(error)}") from error
        raise ConfigError(f"override {text!r} is not key=value as Hydra writes it: {error}; quote special characters") from error
    if parsed.is_choice_sweep() and not parsed.is_delete():
        key, _, values = text.partition("=")
        if "choice(" not in values:
            raise ConfigError(f"override {text!r} gives several values; for a list, write {key}=[{values}]")
    if parsed.is_sweep_override() or parsed.is_delete() or parsed.package is not None:
        raise ConfigError(f"override {text!r} is a sweep or a deletion; give a single value, a list as [1,2], or null")
    return make_override(parsed.key_or_group, parsed.value(), text=text)


def make_override(key: str, value: Any, *, text: str) -> Override:
    """An override of a Python value. `text` is how it was written, for errors."""
    if not isinstance(value, Mapping):
        if key in SECTIONS_BY_NAME:
            key = f"{key}.{SECTIONS_BY_NAME[key]}"
        elif key == "place":
            value = parse_place(value)
        key = _SHORT_NAMES.get(key, key)
    return Override(key=key, value=value, text=text)


def refuse_flags(arguments: Sequence[str], known: Sequence[str]) -> None:
    """Raise `ConfigError` for an unknown flag, with the nearest of the `known` settings."""
    for argument in arguments:
        if argument.startswith("-"):
            name = argument.partition("=")[0]
            key = name.lstrip("-").replace("-", "_")
            raise ConfigError(f"there is no flag {name}; settings are written key=value{suggest(key, known)}")


def suggest(key: str, known: Sequence[str]) -> str:
    """The end of an error about an unknown key: its name in this library, the nearest names, or the
    full path of a key that lacks its section."""
    leaf = key.rsplit(".", 1)[-1]
    if key in RENAMED:
        return f"; it is now called {RENAMED[key]}"
    foreign = explain(key, known) or explain(leaf, known)
    if foreign is not None:
        return f"; {foreign}"
    same_leaf = [name for name in known if name.rsplit(".", 1)[-1] == leaf]
    section = key[: -len(leaf)]  # compared without it: two keys of one section always have much in common
    siblings = [name[len(section) :] for name in known if section and name.rpartition(".")[0] == section[:-1]]
    close = get_close_matches(leaf, siblings, n=2, cutoff=0.7) or [name for name in siblings if name.startswith(f"{leaf}_")]
    near = same_leaf or [section + name for name in close]
    near = near or get_close_matches(key, known, n=3, cutoff=0.85 if siblings else 0.6)
    return f"; did you mean {' or '.join(near)}?" if near else "; `--print-config` lists every key"


def first_line(error: Exception) -> str:
    """The first line of its message: those of OmegaConf and Hydra have more, of their own terms."""
    return str(error).splitlines()[0]


LARGEST_FILE = 1_000_000
"""Characters."""
MOST_VALUES = 20_000
"""Keys and values, with aliases expanded."""


def check_yaml(text: str, where: str) -> None:
    """Raise ConfigError for a file that is too large, and yaml.YAMLError or RecursionError for
    one that is not YAML."""
    import yaml  # type: ignore[import-untyped]

    if len(text) > LARGEST_FILE:
        raise ConfigError(f"{where} has {len(text):,} characters; a file of settings has at most {LARGEST_FILE:,}")
    nodes, count = [yaml.compose(text, Loader=yaml.SafeLoader)], 0
    while nodes:
        node = nodes.pop()
        count += 1
        if count > MOST_VALUES:
            raise ConfigError(
                f"{where} stands for more than {MOST_VALUES:,} values once its aliases are written out; write fewer"
            )
        if isinstance(node, yaml.MappingNode):
            nodes += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value


def check_plain(value: Any, where: str) -> None:
    """Raise ConfigError for text that refers to other values or to the environment, that holds
    a NUL character, or that cannot be encoded in UTF-8."""
    if isinstance(value, dict):
        for key, inner in value.items():
            check_plain(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            check_plain(inner, f"{where}[{number}]")
    elif isinstance(value, str):
        if "${" in value:
            raise ConfigError(
                f"{where} ({value[:60]}) refers to another value; settings do not resolve ${{...}}, write the value itself"
            )
        if "\0" in value:
            raise ConfigError(f"{where} ({value[:60]!a}) holds a NUL character, which no text or path can have")
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise ConfigError(f"{where} ({value[:60]!a}) holds half of a surrogate pair, which is not valid text")
