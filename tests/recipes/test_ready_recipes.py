"""The recipes for public models and data, each as it is but for its model, its number of steps, and
where episodes are played, fewer prompts. `datasets.load_dataset` returns a few rows with the
columns of the data that the recipe names."""

import json
from pathlib import Path
from typing import Any

import commands
import public_rows
import pytest
from chatml_qwen import save_model

from ludic.recipes.compose import COMMANDS, list_builtin_recipes

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2 + 2"}}\n</tool_call>'
DOUBLE = "```python\ndef double(n):\n    return 2 * n\n```"
SQUARE = "```python\ndef square(n):\n    return n * n\n```"


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", public_rows.load_dataset)


def run(
    tmp_path: Path, command: str, name: str, phrases: list[str], *settings: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, metrics of each training step)."""
    model = save_model(tmp_path / "model", phrases)
    commands.ludic(command, name, f"model={model}", "steps=3", f"output={tmp_path}", "name=run", *settings)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return commands.summary_of(tmp_path / "run"), [line for line in lines if "train/loss" in line]


def reinforce(
    tmp_path: Path, name: str, phrases: list[str], prompts: int, group_size: int, *settings: str
) -> list[dict[str, Any]]:
    """Three steps of `ludic train NAME`, whose rewards differ. Each has `prompts` groups."""
    answers = prompts * group_size
    summary, steps = run(tmp_path, "train", name, phrases, f"rollout.prompts={prompts}", *settings)
    assert (summary["status"], summary["steps"], summary["idle_steps"]) == ("finished", 3, 0)
    assert summary["episodes"]["failed"] == 0
    assert [step["train/target_rollouts"] for step in steps] == [answers] * 3
    assert all(0 < step["train/avg_total_reward"] < 1 and step["train/grad_norm"] > 0 for step in steps)
    assert steps[0]["reference/scored"] == steps[0]["train/num_samples"] >= answers  # each call is a sample
    return steps


@pytest.mark.parametrize(("name", "phrases"), [("gsm8k", ["4", "6"]), ("math", ["4", "\\boxed{9}"])])
def test_answers_to_problems_of_mathematics_are_rewarded(tmp_path: Path, name: str, phrases: list[str]) -> None:
    steps = reinforce(tmp_path, name, phrases, 16, 5)
    assert [step["train/optimizer_steps"] for step in steps] == [4] * 3


@pytest.mark.integration  # half a minute: conversations of up to five model calls
def test_the_calculator_is_called_before_the_answer(tmp_path: Path) -> None:
    steps = reinforce(tmp_path, "gsm8k-tools", ["6", CALL], 8, 16)
    assert all(step["train/tools/calls"] > 0 and step["train/tools/failed"] == 0 for step in steps)


@pytest.mark.filterwarnings("ignore:unsafe_subprocess runs programs")
def test_programs_are_rewarded_by_the_tests_of_mbpp(tmp_path: Path) -> None:
    """Without a sandbox, which this machine may not have: the programs are the two of this file."""
    reinforce(tmp_path, "mbpp", [DOUBLE, SQUARE], 16, 14, "task.args.backend=unsafe_subprocess")


def test_conversations_of_capybara_are_learnt(tmp_path: Path) -> None:
    """The base model's end token is another one; the end of a turn is trained and saved."""
    model = save_model(tmp_path / "model", ["4"], eos="<|endoftext|>")
    commands.ludic("sft", "capybara", f"model={model}", "steps=3", f"output={tmp_path}", "name=run")
    summary = commands.summary_of(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert summary["data"]["samples_without_end"] == 0
    saved = json.loads((tmp_path / "run" / "model" / "tokenizer_config.json").read_text())
    assert saved["eos_token"] == "<|im_end|>"


def test_dpo_on_ultrafeedback_holds_out_its_test_split(tmp_path: Path) -> None:
    summary, steps = run(tmp_path, "dpo", "ultrafeedback", ["4"])
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert steps[0]["train/loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: the policy is the reference
    assert summary["data"]["heldout_pairs"] == 2


def test_the_reward_model_of_ultrafeedback_holds_out_its_test_split(tmp_path: Path) -> None:
    summary, steps = run(tmp_path, "train-rm", "ultrafeedback", ["4"])
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert all(step["train/grad_norm"] > 0 for step in steps)
    assert summary["data"]["heldout_pairs"] == 2


def test_the_help_of_each_command_names_its_recipes() -> None:
    for command in COMMANDS:
        shown = commands.ludic(command, "--help")
        unnamed = {name for name in list_builtin_recipes(command) if name not in shown}
        benchmarks = {name for name in unnamed if name.startswith("eval-")}  # those of ludic eval
        assert unnamed - benchmarks == ({"code"} if command == "train" else set())


def test_the_page_has_each_recipe_with_its_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ready-recipes.md").read_text()
    ready = {"gsm8k", "math", "gsm8k-tools", "mbpp"}
    named = {f"ludic {command} {name}" for command in COMMANDS[1:] for name in list_builtin_recipes(command)}
    assert ready < set(list_builtin_recipes())
    assert {line for line in named | {f"ludic train {name}" for name in ready} if f"`{line}`" not in page} == set()
