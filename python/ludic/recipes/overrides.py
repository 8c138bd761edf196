"""Overrides of settings: `key=value` in Hydra's grammar, short and former names, the flags of
`ludic train-rm`, and what an error about an unknown name suggests.

Limits on files of settings: their size, aliases and references.

With aliases a few lines can stand for billions of values or contain themselves. OmegaConf's
`${...}` can do the same, or copy an environment variable into the config.yaml of a run. Values are
therefore counted before any is built, and `${...}` is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ludic.errors import ConfigError, did_you_mean
from ludic.recipes.foreign_names import SETTINGS, explain
from ludic.recipes.processes import SHORT_FORMS, parse_place

SECTIONS_BY_NAME = {
    **dict.fromkeys(("inference", "sharding", "quantization", "curriculum"), "kind"),
    "reference": "source",
    "loss": "loss_type",
    "teacher": "model",
    "agent": "function",
}
"""Sections that can be set to one word, which is the value of this field: `inference=vllm`."""

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
    except (HydraException, ValueError, RecursionError) as error:
        reason = f"{first_line(error)}; quote special characters"
        raise ConfigError(f"override {text[:60]!a} is not key=value as Hydra writes it: {reason}") from error
    if parsed.is_sweep_override() or parsed.is_delete() or parsed.package is not None:
        values = text.partition("=")[2]
        remedy = "one list is [1,2]" if "(" in values else f"for a list, write {parsed.key_or_group}=[{values}]"
        raise ConfigError(f"override {text!r} must give a setting one value; {remedy}")
    return make_override(parsed.key_or_group, parsed.value(), text=text)


def make_override(key: str, value: Any, *, text: str) -> Override:
    """An override of a Python value. `text` is how it was written, for errors."""
    if not isinstance(value, Mapping):
        if key == "agent" and isinstance(value, list):
            key = "agent.command"
        elif key in SECTIONS_BY_NAME:
            key = f"{key}.{SECTIONS_BY_NAME[key]}"
        elif key == "place":
            value = parse_place(value)
        key = {**SHORT_FORMS, "log": "report_to", "data.curriculum": "curriculum.kind"}.get(key, key)
    return Override(key=key, value=value, text=text)


def refuse_flags(arguments: Sequence[str], known: Sequence[str]) -> None:
    """Raise `ConfigError` for an unknown flag, with the nearest of the `known` settings."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("-"):
            remedy = suggest(name.lstrip("-").replace("-", "_"), known)
            raise ConfigError(f"there is no flag {name}; settings are written key=value{remedy}")


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
            raise ConfigError(f"{where} has more than {MOST_VALUES:,} values with its aliases written out; write fewer")
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
            raise ConfigError(f"{where} ({value[:60]}) refers to another value; write the value itself instead of ${{...}}")
        if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
            raise ConfigError(f"{where} ({value[:60]!a}) holds a NUL character or half of a surrogate pair, which no text has")


FLAGS = {
    "--model": "model",
    "--tokenizer": "tokenizer",
    "--data": "data",
    "--hf-dataset": "data",
    "--hf-config": "data_config",
    "--hf-split": "split",
    "--limit": "limit",
    "--steps": "steps",
    "--batch-size": "batch_size",
    "--micro-token-budget": "trainer.micro_token_budget",
    "--max-seq-len": "trainer.max_seq_len",
    "--lr": "trainer.lr",
    "--weight-decay": "trainer.weight_decay",
    "--warmup-steps": "trainer.warmup_steps",
    "--lr-scheduler": "trainer.lr_scheduler_type",
    "--beta": "loss.beta",
    "--regularization-lambda": "loss.regularization_lambda",
    "--label-smoothing": "loss.label_smoothing",
    "--lora-rank": "lora.rank",
    "--lora-alpha": "lora.alpha",
    "--lora-dropout": "lora.dropout",
    "--lora-target-modules": "lora.target_modules",
    "--eval-data": "heldout_data",
    "--eval-split": "heldout_split",
    "--eval-limit": "heldout_limit",
    "--eval-every": "trainer.eval_every_n_steps",
    "--early-stopping-patience": "trainer.early_stopping_patience",
    "--seed": "seed",
}
"""Flag -> its setting."""
SWITCHES = {
    "--lora": Override("lora.rank", 8, "--lora"),
    "--profile-memory": Override("trainer.profile_memory", True, "--profile-memory"),
    "--profile-gpu": Override("trainer.profile_memory", True, "--profile-gpu"),
    "--gradient-checkpointing": Override("gradient_checkpointing", True, "--gradient-checkpointing"),
}
_DIRECTORY = "--output-dir"


def parse_flags(arguments: Sequence[str | Override]) -> Iterator[str | Override]:
    """The arguments in order, with flags turned into overrides; parsed overrides come last.

    Raises ConfigError for an unknown flag, a flag without its value, and LoRA settings without
    `--lora`.
    """
    written = [argument for argument in arguments if isinstance(argument, str)]
    remaining = iter(written)
    names = [argument.partition("=")[0] for argument in written]
    has_lora = any(name == "--lora" or name.startswith("lora.") for name in names)
    without = [name for name in names if name.startswith("--lora-") and name in FLAGS]
    if without and not has_lora and not any(argument.endswith((".yaml", ".yml")) for argument in written):
        raise ConfigError(f"{without[0]} has no effect without --lora: add --lora, or leave {without[0]} out")
    for argument in remaining:
        name, has_value, value = argument.partition("=")
        if not name.startswith("--"):
            yield argument
        elif name in SWITCHES and not has_value:
            if name != "--lora" or "--lora-rank" not in names:
                yield SWITCHES[name]
        elif name in FLAGS or name == _DIRECTORY:
            if not has_value:
                value = next(remaining, "--")
                if value.startswith("--"):
                    raise ConfigError(f"{name} needs a value after it")
            yield from _make_overrides(name, value)
        elif name in SWITCHES:
            raise ConfigError(f"{name} is a switch and takes no value")
        else:
            ours = SETTINGS.get(name.lstrip("-").replace("-", "_"), "").split(",")
            others = "`ludic train-rm --help` lists them; settings without one are key=value"
            remedy = did_you_mean(name, [*FLAGS, *SWITCHES, _DIRECTORY], others, count=2)
            named = next((f"; it is called {flag}" for flag, key in FLAGS.items() if key in ours), remedy)
            raise ConfigError(f"there is no flag {name}{named}")
    yield from (argument for argument in arguments if isinstance(argument, Override))


def _make_overrides(name: str, value: str) -> Iterator[Override]:
    if name == _DIRECTORY:
        path = Path(value).expanduser()
        yield Override("output", str(path.parent), f"{name} {value}")
        yield Override("name", path.name, f"{name} {value}")
        return
    is_list = FLAGS[name] == "lora.target_modules"
    names = [part.strip() for part in value.split(",") if part.strip()]
    yield Override(FLAGS[name], names if is_list else value, f"{name} {value}")
