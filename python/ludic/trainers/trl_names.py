"""Arguments of TRL's trainers, and what is written for them here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from os import PathLike
from typing import Any, ParamSpec, TypeVar

from ludic.errors import ConfigTypeError

P = ParamSpec("P")
T = TypeVar("T")

INSTEAD: Mapping[str, str] = {
    "reward_funcs": "reward_functions",
    "train_dataset": "dataset",
    "processing_class": "tokenizer= with a folder or a hub id, unless it is the model's own",
    "tokenizer": "tokenizer= with a folder or a hub id, unless it is the model's own",
    "args": "the settings themselves, such as steps=100, trainer={'lr': 1e-5} or rollout={'group_size': 8}",
    "peft_config": "lora={'rank': 16, 'alpha': 32}",
    "reward_processing_classes": "nothing: a reward model's folder has its tokenizer (reward_model=FOLDER)",
    "reward_model": "reward_model= with the folder of `ludic train-rm`, or a hub id",
    "optimizers": "trainer={'lr': 1e-5, 'betas': [0.9, 0.99], 'lr_scheduler_type': 'cosine'}",
    "data_collator": "nothing: batches are packed by the library",
    "formatting_func": "rows with `text`, with `prompt` and `completion`, or with `messages`",
    "compute_metrics": "callbacks=[...] of ludic.training.Callback",
    "compute_loss_func": "ludic.training.Trainer with an algorithm of your own (docs/training.md)",
    "rollout_func": "ludic.rollouts, or a protocol of your own (docs/rollouts.md)",
    "environment_factory": "task= with a class of your own (docs/quickstart.md#a-multi-turn-environment)",
    "tools": "GRPO(model, reward, rows, tools=[...]), or rows with a column `tools` to fine-tune on",
    "max_tool_calling_iterations": "rollout={'max_tool_turns': N}",
}
"""Name in TRL -> the argument here, or how to say it."""
_SETTINGS_TOO = ("tokenizer", "reward_model")
"""Names that are settings here, whose values are paths and no objects."""


def without_trl_names(call: Callable[P, T]) -> Callable[P, T]:
    """`call`, which refuses arguments that are TRL's and not its own with a ConfigTypeError that
    names ours for each."""
    own = signature(call).parameters

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        _refuse({name: value for name, value in kwargs.items() if name not in own})
        return call(*args, **kwargs)

    return wrapped


def _refuse(arguments: Mapping[str, Any]) -> None:
    wrong = [name for name in arguments if name in INSTEAD and not _is_setting(name, arguments[name])]
    if wrong:
        raise ConfigTypeError("; ".join(f"{name} is an argument of TRL; write {INSTEAD[name]}" for name in wrong))


def _is_setting(name: str, value: Any) -> bool:
    return name in _SETTINGS_TOO and (value is None or isinstance(value, str | PathLike))
