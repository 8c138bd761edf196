"""Flags of `ludic train-rm`: `--lr 5e-6 --lora` for `trainer.lr=5e-6 lora.rank=8`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError, did_you_mean
from ludic.recipes.foreign_names import SETTINGS
from ludic.recipes.overrides import Override

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
