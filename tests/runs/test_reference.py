"""The reference of `ludic train`: kept when reinforcement begins, read by a resumed run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_recipe import TINY as SORT
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import ConfigError
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.compose import compose
from ludic.recipes.model import make_small_model
from ludic.recipes.sections import ReferenceSection, check_reference, switches_adapters_off
from ludic.runs.directory import RunDirectory

KL = "algorithm_args.reference_kl=0.1"
TINY = [
    *("threads=1", "steps=3", "rollout.prompts=2", "rollout.group_size=4", "task.args.max_new_tokens=4", "trainer.lr=0.1"),
    "trainer.minibatches_per_batch=1",  # the KL of the first step is that of the start
    *("evaluation.samples_per_prompt=2", "task.args.num_heldout=3", "reward=byte_rewards:mean_id"),
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """An untrained model on disk, and problems whose answers almost never earn the same."""
    path = tmp_path_factory.mktemp("start")
    sizes = ["hidden_size=16", "num_heads=2", "num_kv_heads=1", "intermediate_size=16"]
    torch.manual_seed(0)
    make_small_model(compose([f"network.{size}" for size in sizes]).network).save_pretrained(path / "model")
    make_byte_tokenizer().save_pretrained(path / "model")
    rows = [{"prompt": f"{letter}?"} for letter in "abcdefghij"]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*TINY, f"model={path / 'model'}", f"data={path / 'rows.jsonl'}", f"output={path / 'runs'}"]


def train(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", *arguments])


def folder_of(settings: list[str], name: str) -> Path:
    return Path(settings[-1].removeprefix("output=")) / name


def kl_of(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["reference/kl"] for line in lines if line["phase"] == "reinforce"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(bool((left[name] == right[name]).all()) for name in left)


@pytest.mark.integration
def test_a_resumed_run_keeps_the_reference_that_it_began_with(settings: list[str]) -> None:
    """Three steps in one go, and three with a kill after the first: the same weights and KL."""
    whole, parts = folder_of(settings, "whole"), folder_of(settings, "parts")
    done = train(*settings, "name=whole", "algorithm=grpo", KL)
    assert done.exit_code == 0, done.output
    kl = kl_of(whole)
    assert kl[0] < 1e-6  # the reference is the policy that the reinforcement began with
    assert min(kl[1:]) > 1e-5
    start = Path(next(each for each in settings if each.startswith("model=")).removeprefix("model="))
    assert equal(weights(whole / "reference"), weights(start))
    assert not equal(weights(whole / "model"), weights(start))

    each = ["checkpoint.every_n_steps=1", "checkpoint.max_to_keep=5"]
    assert train(*settings, "name=parts", "algorithm=grpo", KL, *each).exit_code == 0
    # As after a kill in step 2: the newest checkpoint is that of step 1.
    for step in ("step_000002", "step_000003"):
        shutil.rmtree(parts / "checkpoints" / "reinforce" / step, ignore_errors=True)
    killed = replace(RunDirectory(parts).read_progress(), phase="reinforce", steps=0, after=None)
    RunDirectory(parts).write_progress(killed)
    written = (parts / "reference" / "model.safetensors").stat().st_mtime_ns
    resumed = train("--resume", str(parts))
    assert resumed.exit_code == 0, resumed.output
    assert (parts / "reference" / "model.safetensors").stat().st_mtime_ns == written
    assert kl_of(parts) == kl
    assert equal(weights(parts / "model"), weights(whole / "model"))

    RunDirectory(parts).write_progress(killed)
    shutil.rmtree(parts / "reference")
    gone = train("--resume", str(parts))
    assert gone.exit_code != 0
    assert "reference.model=FOLDER" in " ".join(gone.output.split())


def any_of(names: list[str], *quick: str) -> list[Any]:
    """Those that are not `quick` are tried by `pytest -m slow`: they take no other path."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


EXTRAS = {"copy": [], "adapters_off": ["lora.rank=2"], "copy_beside_adapters": ["lora.rank=2", "reference=model"]}


@pytest.mark.parametrize("algorithm", any_of(["grpo", "dr_grpo", "cispo", "scalerl", "maxent_grpo"], "grpo", "maxent_grpo"))
@pytest.mark.integration
def test_every_preset_with_a_reference_runs_on_the_command_line(algorithm: str, settings: list[str]) -> None:
    coefficient = "algorithm_args.beta=0.1" if algorithm == "maxent_grpo" else KL
    extras = [name for name in EXTRAS if algorithm != "grpo" or name != "copy"]  # the run of the test above
    for extra in extras:
        name = f"{algorithm}-{extra}"
        done = train(*settings, f"name={name}", f"algorithm={algorithm}", coefficient, *EXTRAS[extra])
        assert done.exit_code == 0, done.output
        kl = kl_of(folder_of(settings, name))
        assert len(kl) == 3
        assert kl[0] < 1e-6
        assert kl[2] > 1e-5
        assert (folder_of(settings, name) / "reference").is_dir() == (extra != "adapters_off")


@pytest.mark.parametrize("task", any_of(["sort", "addition", "tictactoe", "tools"], "tictactoe"))
@pytest.mark.integration
def test_the_built_in_tasks_take_a_reference(task: str, tmp_path: Path) -> None:
    """In short with episodes of several turns; those above have one."""
    done = train(task, *SORT, f"output={tmp_path}", "name=run", "algorithm=grpo", KL)
    assert done.exit_code == 0, done.output
    assert len(kl_of(tmp_path / "run")) == 3


def test_a_source_that_the_run_does_not_have_is_an_error() -> None:
    check_reference(ReferenceSection(), has_adapters=False)
    with pytest.raises(ConfigError, match=r"reference\.source=adapters_off needs adapters .* lora\.rank"):
        check_reference(ReferenceSection("adapters_off"), has_adapters=False)
    for settings, words in (
        (["source=copy"], r"reference\.source \(copy\) .*auto, model, adapters_off"),
        (["source=attached"], r"reference\.source \(attached\) .*in Python, .*AttachedReference"),
        (["source=adapters_off", "model=folder"], r"reference\.model \(folder\) .* reference\.source=adapters_off; leave one"),
    ):
        with pytest.raises(ConfigError, match=words):
            compose(["lora.rank=2", *(f"reference.{setting}" for setting in settings)])


def test_auto_switches_adapters_off_where_there_are_some_and_no_model_is_named() -> None:
    assert switches_adapters_off(ReferenceSection(), has_adapters=True)
    assert not switches_adapters_off(ReferenceSection(), has_adapters=False)
    assert not switches_adapters_off(ReferenceSection(model="folder"), has_adapters=True)
    assert not switches_adapters_off(ReferenceSection("model"), has_adapters=True)
