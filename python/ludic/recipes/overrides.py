"""Overrides of settings: `key=value` in Hydra's grammar, short and former names, the flags of
`ludic train-rm`, and what an error about an unknown name suggests.

Limits on files of settings: their size, aliases and references.

With aliases a few lines can stand for billions of values or contain themselves. OmegaConf's
`${...}` can do the same, or copy an environment variable into the config.yaml of a run. Values are
therefore counted before any is built, and `${...}` is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ludic.errors import ConfigError, did_you_mean
from ludic.recipes.foreign_names import SETTINGS, explain
from ludic.recipes.processes import SHORT_FORMS, parse_place

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
    """The first line of its message: OmegaConf and Hydra add lines in their own terms."""
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


DEFAULT_RANK = 8


def _split_names(text: str) -> list[str]:
    """Separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


@dataclass(frozen=True)
class Flag:
    """The setting of a flag, and how its value is read."""

    key: str
    read: Callable[[str], Any] = str
    kind: str = "text"
    """The expected value in words, for errors."""


def _make_integer_flag(key: str) -> Flag:
    return Flag(key, int, "a whole number")


def _make_number_flag(key: str) -> Flag:
    return Flag(key, float, "a number")


FLAGS: dict[str, Flag] = {
    "--model": Flag("model"),
    "--tokenizer": Flag("tokenizer"),
    "--data": Flag("data"),
    "--hf-dataset": Flag("data"),
    "--hf-config": Flag("data_config"),
    "--hf-split": Flag("split"),
    "--limit": _make_integer_flag("limit"),
    "--steps": _make_integer_flag("steps"),
    "--batch-size": _make_integer_flag("batch_size"),
    "--micro-token-budget": _make_integer_flag("trainer.micro_token_budget"),
    "--max-seq-len": _make_integer_flag("trainer.max_seq_len"),
    "--lr": _make_number_flag("trainer.lr"),
    "--weight-decay": _make_number_flag("trainer.weight_decay"),
    "--warmup-steps": _make_integer_flag("trainer.warmup_steps"),
    "--lr-scheduler": Flag("trainer.lr_scheduler_type"),
    "--beta": _make_number_flag("loss.beta"),
    "--regularization-lambda": _make_number_flag("loss.regularization_lambda"),
    "--label-smoothing": _make_number_flag("loss.label_smoothing"),
    "--lora-rank": _make_integer_flag("lora.rank"),
    "--lora-alpha": _make_number_flag("lora.alpha"),
    "--lora-dropout": _make_number_flag("lora.dropout"),
    "--lora-target-modules": Flag("lora.target_modules", _split_names, "names separated by commas"),
    "--eval-data": Flag("heldout_data"),
    "--eval-split": Flag("heldout_split"),
    "--eval-limit": _make_integer_flag("heldout_limit"),
    "--eval-every": _make_integer_flag("trainer.eval_every_n_steps"),
    "--early-stopping-patience": _make_integer_flag("trainer.early_stopping_patience"),
    "--seed": _make_integer_flag("seed"),
}
SWITCHES = {
    "--lora": Override("lora.rank", DEFAULT_RANK, "--lora"),
    "--profile-memory": Override("trainer.profile_memory", True, "--profile-memory"),
    "--profile-gpu": Override("trainer.profile_memory", True, "--profile-gpu"),
    "--gradient-checkpointing": Override("gradient_checkpointing", True, "--gradient-checkpointing"),
}
_DIRECTORY = "--output-dir"
_WITH_LORA = ("--lora-rank", "--lora-alpha", "--lora-dropout", "--lora-target-modules")


def parse_flags(arguments: Sequence[str | Override]) -> Iterator[str | Override]:
    """The arguments in order, with flags turned into overrides; parsed overrides come last.

    Raises ConfigError for an unknown flag, a flag without its value, and LoRA settings without
    `--lora`.
    """
    written = [argument for argument in arguments if isinstance(argument, str)]
    remaining = iter(written)
    names = [argument.partition("=")[0] for argument in written]
    _check_lora(names, written)
    for argument in remaining:
        name, has_value, value = argument.partition("=")
        if not name.startswith("--"):
            yield argument
        elif name in SWITCHES and not has_value:
            if name != "--lora" or "--lora-rank" not in names:
                yield SWITCHES[name]
        elif name in FLAGS or name == _DIRECTORY:
            yield from _make_overrides(name, value if has_value else _take_value(name, remaining))
        else:
            raise ConfigError(_describe_unknown(name, is_switch=name in SWITCHES))
    yield from (argument for argument in arguments if isinstance(argument, Override))


def _make_overrides(name: str, value: str) -> Iterator[Override]:
    if name == _DIRECTORY:
        path = Path(value).expanduser()
        yield Override("output", str(path.parent), f"{name} {value}")
        yield Override("name", path.name, f"{name} {value}")
        return
    flag = FLAGS[name]
    try:
        yield Override(flag.key, flag.read(value), f"{name} {value}")
    except ValueError as error:
        raise ConfigError(f"{name} ({value}) must be {flag.kind}") from error


def _take_value(name: str, remaining: Iterator[str]) -> str:
    value = next(remaining, None)
    if value is None or value.startswith("--"):
        raise ConfigError(f"{name} needs a value after it")
    return value


def _check_lora(names: Sequence[str], arguments: Sequence[str]) -> None:
    """Raise ConfigError for LoRA settings without `--lora`, which would train all weights."""
    if (
        "--lora" in names
        or any(name.startswith("lora.") for name in names)
        or any(a.endswith((".yaml", ".yml")) for a in arguments)
    ):
        return
    without = [name for name in names if name in _WITH_LORA]
    if without:
        raise ConfigError(
            f"{without[0]} has no effect without --lora: add --lora, or leave {without[0]} out to train all weights"
        )


def _describe_unknown(name: str, *, is_switch: bool) -> str:
    if is_switch:
        return f"{name} is a switch and takes no value"
    ours = SETTINGS.get(name.lstrip("-").replace("-", "_"), "").split(",")
    for flag, item in FLAGS.items():
        if item.key in ours:
            return f"there is no flag {name}; it is called {flag}"
    others = "`ludic train-rm --help` lists them; settings without one are key=value"
    return f"there is no flag {name}{did_you_mean(name, [*FLAGS, *SWITCHES, _DIRECTORY], others, count=2)}"
