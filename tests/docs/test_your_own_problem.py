"""docs/your-own-problem.md, step by step: its files, commands and YAML. Its Python runs in
`test_readme.py`."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.data import load_data
from ludic.recipes.build import build_task
from ludic.recipes.compose import compose

PAGE = Path(__file__).parents[2] / "docs" / "your-own-problem.md"
TINY = [
    *("threads=1", "steps=1", "rollout.prompts=2", "rollout.group_size=4", "evaluation.prompts=3"),
    *("evaluation.samples_per_prompt=1", "network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1"),
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A directory with the files of the page."""
    monkeypatch.chdir(tmp_path)
    exec(blocks("python")[0], {"__name__": "page"})
    Path("rewards.py").write_text(blocks("python")[1])
    yield tmp_path
    sys.modules.pop("rewards", None)


def run(line: str, *more: str) -> dict:
    """Run a command of the page and return its summary."""
    name, command, *arguments = shlex.split(line.replace("\\\n", " "))
    assert (name, command) == ("ludic", "train")
    result = CliRunner().invoke(app, ["train", *arguments, *more, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def check_the_object() -> None:
    """The same in Python, with the model that the page has made."""
    [source] = blocks("py")
    small = 'steps=1, threads=1, rollout={"prompts": 1, "group_size": 2}, evaluation={"samples_per_prompt": 1}'
    for printed, run_here in (('"path/to/model"', '"runs/start/model"'), ('name="mine", steps=100', f'name="object", {small}')):
        assert source.count(printed) == 1
        source = source.replace(printed, run_here)
    namespace: dict[str, Any] = {"__name__": "page"}
    exec("from rewards import exact, length\n" + source, namespace)
    assert (namespace["summary"]["status"], namespace["grpo"].trainer.current_step) == ("finished", 1)


def test_every_step_of_the_page_works(here: Path) -> None:
    template, start, own, both = (block.strip() for block in blocks("sh"))
    run(start, *[setting for setting in TINY if not setting.startswith("steps=")], "warmup.steps=1")
    small = [setting for setting in TINY if not setting.startswith("network.")]
    assert set(run(own, *small)["after"]) == {"sampled_reward", "greedy_accuracy"}
    assert set(run(both, *small)["after"]) == {"sampled_reward", "greedy_accuracy", "rewards/exact", "rewards/length"}
    check_the_object()
    settings, mixture = blocks("yaml")
    Path("mine.yaml").write_text(settings)
    Path("harder.jsonl").write_text('{"prompt": "97+98=", "answer": "195"}\n{"prompt": "98+99=", "answer": "197"}\n')
    Path("mixed.yaml").write_text(settings.replace("data: problems.jsonl\n", mixture))
    for arguments in (["mine.yaml"], ["mixed.yaml"], shlex.split(template)[2:]):
        recipe = compose(arguments)
        assert build_task(recipe.task, data=recipe.data, reward=recipe.reward).heldout()


def test_the_conversation_of_the_page_is_a_valid_row(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(blocks("json")[0])
    loaded = load_data(str(tmp_path / "chat.jsonl"))
    assert (loaded.kind, loaded.conversational) == ("prompt", True)


@pytest.mark.integration
def test_the_run_of_the_page_learns(here: Path) -> None:
    """From the demonstrations' accuracy of a quarter to nearly 1, by the reward alone. With one
    thread, since `.ci/run` has a process of tests on each core."""
    _, start, own, _ = (block.strip() for block in blocks("sh"))
    run(start, "threads=1")
    summary = run(own, "threads=1")
    assert summary["before"]["sampled_reward"] < 0.4
    assert summary["after"]["sampled_reward"] > 0.9
