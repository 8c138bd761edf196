"""What a file of settings may hold: values that are there, of a size that a person wrote.

Aliases can make a few lines stand for billions of values or for themselves, and OmegaConf's
`${...}` can do the same, or carry an environment variable into the config.yaml that a run keeps. So
the values that a file stands for are counted before any is made, and `${...}` is refused.
"""

from __future__ import annotations

from typing import Any

from ludic.errors import ConfigError

LARGEST_FILE = 1_000_000
"""Characters."""
MOST_VALUES = 20_000
"""Keys and values, each alias counted as what it stands for."""


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
    """Raise ConfigError for text that refers to other values or to the environment, or that
    UTF-8 cannot write."""
    if isinstance(value, dict):
        for key, inner in value.items():
            check_plain(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            check_plain(inner, f"{where}[{number}]")
    elif isinstance(value, str):
        if "${" in value:
            raise ConfigError(
                f"{where} ({value[:60]}) refers to another value; ${{...}} is not resolved in settings, write the value itself"
            )
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise ConfigError(f"{where} ({value[:60]!a}) holds half of a surrogate pair, which is no text")
