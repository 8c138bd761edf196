"""The folder of a finished run as an argument of `ludic eval` and `ludic rollout`."""

from __future__ import annotations

import json
from pathlib import Path

from ludic.errors import ConfigError


def expand_run_folder(argument: str) -> list[str]:
    """For the folder of a run: the arguments that give its recipe with the trained model. Any
    other argument is returned as it is. Raises ConfigError for a run without a task or without a
    model yet."""
    folder = Path(argument)
    if not (folder / "config.yaml").is_file():
        return [argument]
    _check_has_task(folder)
    if not (folder / "model").is_dir():
        raise ConfigError(
            f"{argument} has no model yet; resume it with `ludic train --resume {argument}`, or name a run that has one"
        )
    saved = [f"{name}=null" for name in ("tokenizer", "chat_template", "eos_token", "name")]  # those of the model's folder
    return [str(folder / "config.yaml"), f"model='{folder / 'model'}'", *saved]


def _check_has_task(folder: Path) -> None:
    """Raise `ConfigError` for a run of another command than `ludic train`, which has no task."""
    try:
        command = json.loads((folder / "progress.json").read_text(encoding="utf-8")).get("command", "train")
    except (OSError, ValueError, AttributeError):
        return
    if command in ("sft", "dpo"):
        raise ConfigError(f"{folder} is a run of `ludic {command}`, which has no task; say which, such as: sort model={folder}")
    if command == "train-rm":
        raise ConfigError(
            f"{folder} is a run of `ludic train-rm`: a reward model scores and does not answer; its own measurement is in "
            f"{folder / 'summary.json'}, and reward_model={folder} lets it score the answers of another model"
        )
