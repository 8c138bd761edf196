"""Supervised fine-tuning and reinforcement learning from one configuration tree.

    await run_pipeline("experiment.yaml")                     # output.mode: sft, rl or sft+rl

    run = await run_sft(config, "results/first")              # or one after the other
    await run_rl(config, "results/first", latest_checkpoint(run))

A tree is translated to the settings of `ludic sft` or `ludic train`, which run in a process of
their own, or under torchrun where the tree names several GPUs. What they write, and how they
resume, is theirs: called again with the same tree, an unfinished run goes on where it was.

    target: {gpu_ranks: [0], device_type: cuda, train_backend: pytorch}
    model: {name: Qwen/Qwen2.5-0.5B-Instruct}
    data:
      sft_mixture: [{filepath: chats.jsonl}]
      rl_mixture: [{name: openai/gsm8k, subset: main}]
    sft: {num_epochs: 1}
    rl: {examples_per_step: 16, num_samples: 16, reward: gsm8k}
    output: {save_dir: results, experiment_name: first, mode: sft+rl}

Learning rates that are not given are 2e-5 and 5e-6, as in the recipe `data` for a loaded model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ludic.data.sources import read_table
from ludic.errors import CheckpointError, ConfigError, DataError, LaunchError, did_you_mean
from ludic.files.atomic import read_json, write_text
from ludic.files.checkpoints import PICKLED
from ludic.files.json_values import encode_lines
from ludic.files.jsonl import write_jsonl
from ludic.launch.torchrun import AGENT
from ludic.rollouts.training.datasets.dataset_loaders import ANSWER_COLUMNS, PROMPT_COLUMNS, first_of, messages_of_row

logger = logging.getLogger(__name__)
Config = Mapping[str, Any] | str | Path
Rows = list[Mapping[str, Any]]
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
    phases there, of which the later counts. In an `output_dir` it belongs to the run of `run_rl`,
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
        if found and any((found[max(found)] / name).is_file() for name in PICKLED):
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
        raise LaunchError(f"`ludic {command}` ended with status {status}; go on with `ludic {command} --resume {run}`")
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
        raise ConfigError(f"{run} began with other settings: {', '.join(changed)}; put them back, or choose another output_dir")


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


MODES = ("sft", "rl", "sft+rl")
_RATES = {"matrix_lr": None, "embedding_lr": None, "unembedding_lr": None, "init_lr_frac": None, "weight_decay": 0.0}
_ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "clip_grad": 1.0}
_COUNTS = {"num_epochs": 1, "num_iterations": -1, "batch_size": None}
_SHARED = {**_RATES, **_ADAM, **_COUNTS, "warmup_ratio": 0.03, "lr_decay_style": "cosine"}
_SFT = {"target_examples_per_step": 32, "eval_every": None, "eval_steps": None, "checkpoint_every": 500, "log_every": 10}
_RL = {"examples_per_step": 16, "num_samples": 16, "max_new_tokens": 256, "temperature": 1.0, "top_k": None, "baseline": 0.0}
_MEASURED = {"reward": None, "eval_every": 0, "eval_examples": 200, "save_every": 60}
_OUTPUT = {"save_dir": "./results", "log_level": "INFO", "experiment_name": None, "mode": "sft", "source_checkpoint": None}
_MASTER = {"master_addr": "localhost", "master_port": 29500}
DEFAULTS: dict[str, dict[str, Any]] = {
    "target": {"gpu_ranks": [0], "device_type": None, "train_backend": "pytorch", **_MASTER},
    "model": {"name": None, "dtype": "bfloat16", "compile": False},
    "data": {"sft_mixture": [], "rl_mixture": [], "max_length": 2048, "shuffle_seed": 42},
    "sft": {**_SHARED, **_SFT},
    "rl": {**_SHARED, **_RL, **_MEASURED},
    "output": {**_OUTPUT, "use_wandb": False, "wandb_project": None},
}
"""Section -> key -> default. None leaves it to the recipe."""
_DATASET = {"name": None, "split": "train", "subset": None, "max_samples": None, "filepath": None, "size": None, "repeat": 1}
_WITHOUT_COUNTERPART = {
    "embedding_lr": "one rate is for all weights: matrix_lr",
    "unembedding_lr": "one rate is for all weights: matrix_lr",
    "init_lr_frac": "the rate rises from 0 over warmup_ratio of the steps",
    "batch_size": "micro-batches follow from tokens, not from a batch size of the device",
    "eval_steps": "supervised training measures nothing here",
    "top_k": "tokens are sampled from the whole distribution, which is the one that is trained",
    "baseline": "advantages are relative to the group",
}
"""Keys that are read and not followed, and why; a value is named in a warning."""


def read_tree(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The whole tree, with defaults. Raises ConfigError for an unknown section or key, with the
    nearest name."""
    tree = {}
    for section in config:
        _check_known(section, DEFAULTS, "section")
    for section, defaults in DEFAULTS.items():
        given = config.get(section) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"{section} ({given!r}) must be a mapping of {', '.join(defaults)}")
        for key in given:
            _check_known(key, defaults, f"setting in {section}")
        tree[section] = {**defaults, **given}
        ignored = [key for key in given if key in _WITHOUT_COUNTERPART and given[key] not in (None, defaults[key])]
        for key in ignored:
            logger.warning("%s.%s (%s) is not followed: %s", section, key, given[key], _WITHOUT_COUNTERPART[key])
    _check_values(tree)
    return tree


def _check_known(name: str, known: Mapping[str, Any], what: str) -> None:
    if name not in known:
        remedy = did_you_mean(str(name), known, f"there are {', '.join(known)}")
        raise ConfigError(f"there is no {what} {name!r}{remedy}")


def _check_values(tree: Mapping[str, Mapping[str, Any]]) -> None:
    target, mode = tree["target"], tree["output"]["mode"]
    ranks, backend = target["gpu_ranks"], target["train_backend"]
    if mode not in MODES:
        remedy = did_you_mean(str(mode), MODES, cutoff=0.5)
        raise ConfigError(f"output.mode ({mode}) must be one of {', '.join(MODES)}{remedy}")
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
        raise ConfigError(f"target.gpu_ranks ({ranks!r}) must be a list of the numbers of GPUs, such as [0, 1]")
    if backend not in ("pytorch", "fsdp"):
        raise ConfigError(f"target.train_backend ({backend}) must be pytorch or fsdp")
    if len(ranks) > 1 and backend != "fsdp":
        raise ConfigError(f"target.gpu_ranks ({ranks}) are {len(ranks)} GPUs, and train_backend=pytorch uses one; set it to fsdp")
    if tree["model"]["compile"]:
        raise ConfigError("model.compile is not supported; leave it out")
    if tree["model"]["name"] is None:
        raise ConfigError("model.name is missing; it is a folder in Hugging Face layout, or a hub id")
    sides = [side for side in ("sft", "rl") if side in mode.split("+") and not tree["data"][f"{side}_mixture"]]
    if sides:
        raise ConfigError(f"output.mode is {mode}, and data.{sides[0]}_mixture is empty; give it [{{filepath: FILE.jsonl}}]")


class Translation(NamedTuple):
    """A tree as settings of `ludic`, and the rows that it trains on, by the file they belong in."""

    recipe: dict[str, Any]
    rows: dict[str, Rows]


def translate_sft(tree: Mapping[str, Mapping[str, Any]], folder: Path) -> Translation:
    """Settings of `ludic sft`, for a run in `folder / "sft"`. Its rows belong below `folder`."""
    recipe = _translate_common(tree, folder, "sft", model=None) | _translate_sft_section(tree, folder)
    recipe |= {"heldout": 0.0, "checkpoint": {"every_n_steps": tree["sft"]["checkpoint_every"]}}
    return Translation(recipe, {_name_rows(folder, "sft"): _read_sft_rows(tree)})


def translate_rl(tree: Mapping[str, Mapping[str, Any]], folder: Path, *, mode: str, model: str | None = None) -> Translation:
    """Settings of `ludic train`, for a run in `folder / "rl"`, or `folder / "sft+rl"` where `mode`
    is that. Its problems, and its rows, belong below `folder`.

    model: what to begin with, instead of `model.name`.
    """
    rl = tree["rl"]
    rows = [make_rl_row(row, where) for where, row in _mix(tree["data"]["rl_mixture"], "data.rl_mixture")]
    steps = rl["num_iterations"] if rl["num_iterations"] > 0 else -(-rl["num_epochs"] * len(rows) // rl["examples_per_step"])
    recipe = {"recipe": "data", "mode": mode, **_translate_common(tree, folder, mode, model=model)}
    recipe |= {"data": _name_rows(folder, "rl"), "reward": rl["reward"] or _guess_reward(tree)}
    recipe |= {"steps": steps, "task": {"args": {"max_new_tokens": rl["max_new_tokens"]}}}
    recipe |= {"algorithm": "grpo" if rl["num_samples"] > 1 else "reinforce"}
    recipe["rollout"] = {"prompts": rl["examples_per_step"], "group_size": rl["num_samples"], "temperature": rl["temperature"]}
    recipe["trainer"] = _translate_trainer(tree, "rl") | ({"eval_every_n_steps": rl["eval_every"]} if rl["eval_every"] else {})
    recipe["evaluation"] = {"prompts": rl["eval_examples"]}
    recipe["checkpoint"] = {"every_n_steps": rl["save_every"]}
    if mode == "sft+rl":
        recipe["warmup"] = _translate_sft_section(tree, folder)
        recipe["checkpoint"] = {"every_n_steps": min(rl["save_every"], tree["sft"]["checkpoint_every"])}
    sft_rows = {_name_rows(folder, "sft"): _read_sft_rows(tree)} if mode == "sft+rl" else {}
    return Translation(recipe, {_name_rows(folder, "rl"): rows, **sft_rows})


def _translate_sft_section(tree: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    sft = tree["sft"]
    count = {"steps": sft["num_iterations"]} if sft["num_iterations"] > 0 else {"epochs": sft["num_epochs"]}
    data = {"data": _name_rows(folder, "sft"), "batch_size": sft["target_examples_per_step"]}
    return {**data, **count, "trainer": _translate_trainer(tree, "sft")}


def _translate_common(tree: Mapping[str, Mapping[str, Any]], folder: Path, name: str, *, model: str | None) -> dict[str, Any]:
    trained = tree["model"]
    recipe = {"output": str(folder), "name": name, "model": model or trained["name"], "tokenizer": trained["name"]}
    recipe |= {"dtype": trained["dtype"], "seed": tree["data"]["shuffle_seed"], "log_every": tree["sft"]["log_every"]}
    recipe |= {"report_to": "wandb"} if tree["output"]["use_wandb"] else {}
    return recipe | ({"sharding": {"kind": "full"}} if len(tree["target"]["gpu_ranks"]) > 1 else {})


def _translate_trainer(tree: Mapping[str, Mapping[str, Any]], side: str) -> dict[str, Any]:
    section, length = tree[side], tree["data"]["max_length"]
    schedules = {"constant": "constant_with_warmup"}
    trainer = {
        "betas": [section["adam_beta1"], section["adam_beta2"]],
        "eps": section["adam_eps"],
        "weight_decay": section["weight_decay"],
        "max_grad_norm": section["clip_grad"],
        "lr_scheduler_type": schedules.get(section["lr_decay_style"], section["lr_decay_style"]),
        "warmup_steps": 0,
        "warmup_ratio": section["warmup_ratio"],
        "max_seq_len": length,
        "micro_token_budget": max(8192, length),
    }
    trainer |= {} if section["matrix_lr"] is None else {"lr": section["matrix_lr"]}
    return trainer | ({} if tree["target"]["device_type"] is None else {"model_device": tree["target"]["device_type"]})


def _guess_reward(tree: Mapping[str, Mapping[str, Any]]) -> str:
    """The verifier of gsm8k, where all problems are its own."""
    if all("gsm8k" in str(dataset.get("name")) for dataset in tree["data"]["rl_mixture"]):
        return "gsm8k"
    raise ConfigError("rl.reward is missing; it is gsm8k, math, or a function of yours as module:function")


def _mix(mixture: Sequence[Mapping[str, Any]], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, row) of all data sets of a mixture, one after the other, each `repeat` times."""
    for given in mixture:
        for key in given:
            _check_known(key, _DATASET, f"setting in {name}")
        dataset = {**_DATASET, **given}
        source = dataset["filepath"] or dataset["name"]
        if source is None:
            raise ConfigError(f"{name}: {dict(given)} has neither filepath nor name")
        table = read_table(str(source), config=dataset["subset"], split=dataset["split"])
        limits = [limit for limit in (dataset["max_samples"], dataset["size"], len(table.rows)) if limit is not None]
        for _ in range(dataset["repeat"]):
            yield from ((table.where(index), table.rows[index]) for index in range(min(limits)))


def _read_sft_rows(tree: Mapping[str, Mapping[str, Any]]) -> Rows:
    return [make_sft_row(row, where) for where, row in _mix(tree["data"]["sft_mixture"], "data.sft_mixture")]


def _name_rows(folder: Path, side: str) -> str:
    return str(folder / "data" / f"{side}.jsonl")


def make_sft_row(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A row of `ludic sft` from a row of a public data set.

    Example: `{"question": "2+2?", "answer": "4"}` becomes a conversation of two messages.
    """
    if row.get("messages") is not None or (row.get("prompt") is not None and row.get("completion") is not None):
        return row
    messages = messages_of_row(row, where)
    if messages is not None:
        return {"messages": messages}
    raise DataError(f"{where} has the keys {', '.join(row)}; it needs messages, conversations, or prompt and completion")


def make_rl_row(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A row with `prompt`, with `answer` if there is one, and its other columns."""
    prompt = first_of(row, PROMPT_COLUMNS)
    if prompt is None and isinstance(row.get("messages"), list):
        prompt = [message for message in row["messages"] if message.get("role") != "assistant"][:1]
    if not prompt:
        raise DataError(f"{where} has the keys {', '.join(row)}; a problem has one of {', '.join(PROMPT_COLUMNS)}")
    answer = first_of(row, ANSWER_COLUMNS)
    return {**row, "prompt": prompt, **({} if answer is None else {"answer": answer})}
