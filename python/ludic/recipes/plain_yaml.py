"""Limits on files of settings: their size, aliases and references.

With aliases a few lines can stand for billions of values or contain themselves. OmegaConf's
`${...}` can do the same, or copy an environment variable into the config.yaml of a run. Values are
therefore counted before any is built, and `${...}` is refused.
"""

from __future__ import annotations

from typing import Any

from ludic.errors import ConfigError

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
