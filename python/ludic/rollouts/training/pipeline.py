"""Supervised fine-tuning and reinforcement learning from one configuration tree.

    await run_pipeline("experiment.yaml")                     # output.mode: sft, rl or sft+rl

    run = await run_sft(config, "results/first")              # or one after the other
    await run_rl(config, "results/first", latest_checkpoint(run))

A tree is translated to the settings of `ludic sft` or `ludic train` (`pipeline_tree`), which run in
a process of their own, or under torchrun where the tree names several GPUs. What they write, and
how they resume, is theirs: called again with the same tree, an unfinished run goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.errors import CheckpointError, ConfigError, LaunchError
from ludic.files.atomic import read_json, write_text
from ludic.files.checkpoints import PICKLED
from ludic.files.json_values import encode_lines
from ludic.files.jsonl import write_jsonl
from ludic.launch.torchrun import AGENT
from ludic.rollouts.training.pipeline_tree import Translation, read_tree, translate_rl, translate_sft

Config = Mapping[str, Any] | str | Path
_STEP = re.compile(r"step_(\d+)")
_PHASES = ("", "reinforce", "sft", "warm_up")
_LAST_WRITTEN = ("metadata.json", "manifest.json")
"""A checkpoint is complete once it has one of these."""


async def run_pipeline(config: Config, output_dir: str | Path | None = None) -> Path:
    """Run what `output.mode` says: `sft`, `rl`, or `sft+rl`. Returns the folder of the run, with
    `model`, `checkpoints`, `metrics.jsonl` and `summary.json`.

    output_dir: by default `output.save_dir / output.experiment_name`; without a name, the mode and
        the time.
    """
    tree = read_tree(_load(config))
    output = tree["output"]
    mode = output["mode"]
    name = output["experiment_name"] or f"{mode}_{time.strftime('%Y%m%d_%H%M%S')}"
    folder = Path(output["save_dir"]) / name if output_dir is None else Path(output_dir)
    if mode == "sft":
        return await run_sft(tree, folder)
    if mode == "rl":
        return await run_rl(tree, folder)
    return await _run(
        "train", translate_rl(tree, folder.resolve(), mode=mode, model=_find_model(output["source_checkpoint"])), tree
    )


async def run_sft(config: Config, output_dir: str | Path) -> Path:
    """Supervised fine-tuning, in `output_dir / "sft"`. Returns that folder."""
    tree = _read_for(config, "sft")
    return await _run("sft", translate_sft(tree, Path(output_dir).resolve()), tree)


async def run_rl(config: Config, output_dir: str | Path, source_checkpoint: str | Path | None = None) -> Path:
    """Reinforcement learning, in `output_dir / "rl"`. Returns that folder.

    source_checkpoint: a checkpoint, or the folder of a run, whose weights it begins with; by
        default `output.source_checkpoint`, else `model.name`. Its optimizer is not taken over.
    """
    tree = _read_for(config, "rl")
    model = _find_model(source_checkpoint or tree["output"]["source_checkpoint"])
    return await _run("train", translate_rl(tree, Path(output_dir).resolve(), mode="rl", model=model), tree)


def latest_checkpoint(folder: str | Path) -> Path:
    """The newest complete checkpoint `step_N` in a folder, in its `checkpoints`, or below a run's
    phases there, of which the later counts. In an `output_dir` it is that of the run of `run_rl`,
    else of `run_sft`. Steps are compared as numbers. Raises CheckpointError if there is none.

    Example: of `step_9`, `step_10` and an unfinished `step_11` it is `step_10`.
    """
    root = Path(folder)
    runs = [root, *(root / mode for mode in ("sft+rl", "rl", "sft"))]
    places = [place for run in runs for place in (run, *(run / "checkpoints" / phase for phase in _PHASES))]
    unfinished: list[Path] = []
    for place in places:
        found = {int(match[1]): path for path in place.glob("step_*") if (match := _STEP.fullmatch(path.name))}
        complete = {step: path for step, path in found.items() if any((path / name).is_file() for name in _LAST_WRITTEN)}
        pickled = [path for path in found.values() if any((path / name).is_file() for name in PICKLED)]
        if pickled and max(found) in {step for step, path in found.items() if path in pickled}:
            raise _refuse_pickles(found[max(found)])
        if complete:
            return complete[max(complete)]
        unfinished += found.values()
    more = f"; {', '.join(path.name for path in unfinished)} were not written to their end" if unfinished else ""
    raise CheckpointError(f"{root} has no complete checkpoint step_N, also not in checkpoints{more}")


def _refuse_pickles(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} has pickled weights, which can run code when they are read; load them where they were written, and save them with "
        "model.save_pretrained(FOLDER), as safetensors"
    )


def _load(config: Config) -> Mapping[str, Any]:
    """The tree of a mapping, or of a YAML or JSON file."""
    if isinstance(config, Mapping):
        return config
    from omegaconf import OmegaConf

    from ludic.recipes.compose import read_yaml

    loaded = OmegaConf.to_container(read_yaml(Path(config)))
    if not isinstance(loaded, dict):
        raise ConfigError(f"{config} must hold sections such as model and data")
    return {str(key): value for key, value in loaded.items()}


def _read_for(config: Config, mode: str) -> dict[str, dict[str, Any]]:
    """The tree, read as one of this mode."""
    loaded = _load(config)
    return read_tree({**loaded, "output": {**(loaded.get("output") or {}), "mode": mode}})


def _find_model(source: str | Path | None) -> str | None:
    """The folder with the weights of a checkpoint, of a run, or of a folder of checkpoints."""
    if source is None:
        return None
    path = Path(source)
    if (path / "model" / "config.json").is_file():
        return str((path / "model").resolve())
    if (path / "config.json").is_file():
        return str(path.resolve())
    if any((path / name).is_file() for name in PICKLED):
        raise _refuse_pickles(path)
    return str(latest_checkpoint(path).resolve())


async def _run(command: str, translation: Translation, tree: Mapping[str, Mapping[str, Any]]) -> Path:
    """Run a command of `ludic` with these settings, or resume it where it has begun. Rows and
    settings are written for a new run only."""
    recipe = translation.recipe
    run, file = Path(recipe["output"]) / recipe["name"], Path(recipe["output"]) / f"{recipe['name']}.yaml"
    if (run / "progress.json").is_file():
        _check_same(run, file, translation)
        arguments = ["--resume", str(run)]
    else:
        for path, rows in translation.rows.items():
            write_jsonl(path, rows)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(recipe, indent=2))  # JSON is YAML
        arguments = [str(file)]
    status = await _execute([*_launcher(tree["target"]), command, *arguments], _environment(tree))
    if status:
        raise LaunchError(
            f"`ludic {command}` ended with status {status} (its output says why); call this again to go on, or use "
            f"`ludic {command} --resume {run}`"
        )
    return run


def _check_same(run: Path, file: Path, translation: Translation) -> None:
    """Raise ConfigError, naming what differs, unless the run has these settings and rows."""
    if not file.is_file():
        raise ConfigError(f"{run} has begun, and {file} with its settings is gone; put it back, or choose another output_dir")
    old, new = _list_values(read_json(file)), _list_values(json.loads(json.dumps(translation.recipe)))
    if Path(str(new["model"])).is_relative_to(run):
        new["model"] = old.get("model")  # a checkpoint of the run itself: it goes on from its newest
    changed = [f"{key} ({old.get(key)}, now {new.get(key)})" for key in {**old, **new} if old.get(key) != new.get(key)]
    for path, rows in translation.rows.items():
        if not Path(path).is_file() or Path(path).read_bytes() != b"".join(encode_lines(map(dict, rows))):
            changed.append(f"the rows of {path}")
    if changed:
        raise ConfigError(
            f"{run} has begun with other settings: {', '.join(changed)}; put them back to go on, or choose another output_dir or "
            "output.experiment_name for a new run"
        )


def _list_values(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings by path. Example: `{"trainer": {"lr": 1}}` gives `{"trainer.lr": 1}`."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        values |= _list_values(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


def _launcher(target: Mapping[str, Any]) -> Sequence[str]:
    """What runs `ludic` here. A process that torchrun has started runs it itself, as its rank."""
    ranks = len(target["gpu_ranks"])
    if ranks == 1 or "RANK" in os.environ:
        return [sys.executable, "-m", "ludic.cli"]
    address = [f"--master-addr={target['master_addr']}", f"--master-port={target['master_port']}"]
    return [sys.executable, "-m", AGENT, f"--nproc-per-node={ranks}", *address, "-m", "ludic.cli"]


def _environment(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The environment of the run: the GPUs that it sees, and the project of its tracker."""
    made = dict(os.environ)
    if tree["target"]["device_type"] != "cpu" and "RANK" not in os.environ:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, tree["target"]["gpu_ranks"]))
    if tree["output"]["wandb_project"]:
        made["WANDB_PROJECT"] = str(tree["output"]["wandb_project"])
    return made


async def _execute(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit status of a command. If this is cancelled, the command is told to stop, and waited
    for: it saves a checkpoint."""
    process = await asyncio.create_subprocess_exec(*command, env=dict(environment))
    try:
        return await process.wait()
    except asyncio.CancelledError:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        raise
