"""The tasks of docs/environments.md train as printed, in fewer steps."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tiny_recipe import TINY
from training_samples import tiny_model
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.models.byte_tokenizer import make_byte_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
FEWER = {
    "max_turns = 12": "max_turns = 3",
    "steps=60": 'steps=1, threads=1, rollout={"prompts": 2, "group_size": 2}, evaluation={"prompts": 2, "samples_per_prompt": 1}',
    'warmup={"steps": 100}': 'warmup={"steps": 1, "batch_size": 2}',
    '{"max_positions": 1024}': '{"max_positions": 1024, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}',
}


def test_a_task_on_a_gymnasium_environment_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [source] = re.findall(r"^```python lake\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for old, new in FEWER.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "docs/environments.md", "exec"), names)
    assert (Path("runs") / "lake" / "summary.json").is_file()
    assert "kind: FrozenLake" in (Path("runs") / "lake" / "config.yaml").read_text()


def test_a_task_of_three_members_trains_and_is_evaluated_and_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny model in place of DIRECTORY, and two steps."""
    monkeypatch.chdir(tmp_path)
    [source] = re.findall(r"^```python guess\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    Path("guess.py").write_text(source)
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
    tiny_model(max_position_embeddings=256).save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")

    def run(line: str, *more: str) -> str:
        result = CliRunner().invoke(app, [*shlex.split(line)[1:], *more])
        assert result.exit_code == 0, result.output
        return result.output

    train, evaluate, play = re.findall(r"^ludic .*\bguess\b.*$", PAGE, re.MULTILINE)
    few = [setting for setting in TINY if not setting.startswith(("network.", "warmup."))]
    shown = run(train.replace("DIRECTORY", "tiny"), *few, "steps=2")
    assert "No warm-up: the task has no demonstrations" in shown
    assert "the reward sees what the environment rewards" in shown
    folder = Path("runs/guess")
    assert [json.loads(line)["phase"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == ["reinforce"] * 2
    summary = json.loads((folder / "summary.json").read_text())
    assert {"sampled_reward", "greedy_accuracy"} <= summary["after"].keys()
    assert "Which is it?" in shown
    assert "Held-out problems: 3 problems x 2" in run(evaluate)
    run(play.replace("100", "4"))
    assert Path("guess.jsonl").read_text().count("\n") == 4
