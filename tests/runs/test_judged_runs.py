"""`ludic train reward=judge`: whole runs of a tiny model, with a judge on loopback."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_commands import killed_at, run_to_end
from stub_judges import judged_by, read_question, shown_answers, verdict
from stub_openai_server import StubOpenAIServer
from training_samples import tiny_model
from typer.testing import CliRunner

from ludic import GRPO, Judge
from ludic.cli.app import app
from ludic.errors import ConfigError
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.compose import compose
from ludic.runs.view.episodes import EpisodeTable

ROWS = [{"prompt": f"{letter}?", "answer": letter} for letter in "abcdefghij"]
TINY = [
    *("threads=1", "rollout.prompts=2", "rollout.group_size=4", "rollout.log_every=1", "task.args.max_new_tokens=4"),
    *("evaluation.prompts=3", "evaluation.samples_per_prompt=2", "task.args.num_heldout=3", "reward=judge"),
]


def vowels(data: dict[str, Any], answer: str) -> float:
    return sum(letter in "aeiou" for letter in answer) / 4


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A model and rows, in the current directory."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tiny_model().save_pretrained("model")
    make_byte_tokenizer().save_pretrained("model")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [*TINY, "model=model", "data=rows.jsonl"]


def train(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", *arguments])


def read_lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize("mode", ["points", "ranking"])
def test_a_run_is_rewarded_by_the_judge_and_logs_what_it_was_asked(given: list[str], mode: str) -> None:
    with judged_by(vowels) as server:
        settings = [f"judge.url={server.base_url}", f"judge.mode={mode}", "judge.rubric=[{text: vowels, scale: 0-10}]"]
        result = train(*given, *settings, "steps=2", "name=run")
    assert result.exit_code == 0, result.output
    rollouts = read_lines("runs/run/rollouts.jsonl")
    assert len(rollouts) == 16
    for rollout in rollouts:
        [step] = rollout["steps"]
        asked = step["info"]["reward_log"]["judge"]
        if mode == "points":
            assert [entry["verdict"]["item_1"] for entry in asked] == [round(10 * vowels({}, step["action"]))]
            assert step["reward"] == asked[0]["verdict"]["item_1"] / 10
        judged = [json.loads(entry["prompt"].split("\n")[1]) for entry in asked]
        assert all(step["action"] in shown_answers(data) for data in judged)
    table = EpisodeTable(limit=100)
    table.add(0, Path("runs/run/rollouts.jsonl"), None)
    shown = [turn[10] if len(turn) > 10 else "" for [turn] in (row[6] for row in table.rows)]
    assert all('"reason": "so"' in text and "vowels" in text for text in shown if text)
    assert (
        sum(bool(text) for text in shown) == sum(bool(each["steps"][0]["info"]["reward_log"]["judge"]) for each in rollouts) > 0
    )


def test_groups_without_a_verdict_are_dropped_and_counted_and_a_judge_that_is_away_ends_the_run(given: list[str]) -> None:
    def answer(body: dict[str, Any]) -> Any:
        data, _ = read_question(body)
        return verdict(item_1=data["answer"] > "m") if data["problem"] > "e" else verdict(item_1="yes, and all others too")

    with StubOpenAIServer(answer, idle_s=2.0) as server:
        result = train(*given, f"judge.url={server.base_url}", "steps=6", "name=some")
        address = server.base_url
    assert result.exit_code == 0, result.output
    lines = [line for line in read_lines("runs/some/metrics.jsonl") if line["phase"] == "reinforce"]
    rollouts = read_lines("runs/some/rollouts.jsonl")
    assert 0 < sum(line["train/num_dropped_groups"] for line in lines) < 12
    assert len(rollouts) == 4 * (12 - sum(line["train/num_dropped_groups"] for line in lines))
    assert all(rollout["steps"][0]["prev_obs"] > "e" for rollout in rollouts)
    assert "yes, and all others too" in read_lines("runs/some/failed_episodes.jsonl")[0]["error"]
    result = train(*given, f"judge.url={address}", "judge.model=stub", "judge.cache=none", "steps=1", "name=none")
    assert result.exit_code != 0
    assert re.search(f"the judge gave no verdict.*{address}.* cannot be reached", " ".join(result.output.split()))


def test_a_killed_run_that_is_resumed_asks_nothing_twice(given: list[str]) -> None:
    settings = ["steps=4", "checkpoint.every_n_steps=2"]
    with judged_by(vowels) as server:
        run_to_end(
            "train", *given, *settings, f"judge.url={server.base_url}", "judge.scale=0-10", "name=whole", "judge.cache=whole"
        )
        undisturbed = Counter(map(ask, server.bodies))
    with judged_by(vowels) as server:
        arguments = [*given, *settings, f"judge.url={server.base_url}", "judge.scale=0-10", "name=killed"]
        assert killed_at("line reinforce 3", "train", *arguments)
        before = len(server.bodies)
        asked = Counter(map(ask, server.bodies))
    with judged_by(vowels) as server:  # it has moved
        run_to_end("train", "--resume", "runs/killed", f"judge.url={server.base_url}")
        assert 0 < len(server.bodies) < before
        asked += Counter(map(ask, server.bodies))
    assert asked == undisturbed
    assert set(asked.values()) == {1}
    assert Path("runs/.judge").is_dir()
    weights = [Path("runs", name, "model", "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]


def ask(body: dict[str, Any]) -> str:
    return json.dumps([read_question(body)[0], body["messages"][-1]["content"].split("\n", 3)[3]])


def test_in_python_a_judge_is_a_section_of_the_recipe(given: list[str]) -> None:
    with judged_by(vowels) as server:
        judge = Judge(url=server.base_url, rubric=["vowels", {"text": "brief", "weight": 2}], mode="pairs", timeout_s=9)
        trainer = GRPO("model", [judge, lambda completions: [0.0] * len(completions)], ROWS, reward_weights=[2, 1], steps=1)
    recipe = trainer.recipe
    assert recipe.reward == ["judge", "reward"]
    assert (recipe.judge.url, recipe.judge.rubric, recipe.judge.mode) == (judge.url, judge.rubric, "pairs")
    assert recipe.judge.timeout_s == 9
    assert compose(["data=rows.jsonl", "reward=judge"]).judge == type(recipe.judge)()
    with pytest.raises(ConfigError, match="judge"):
        GRPO("model", [judge, Judge(url=server.base_url)], ROWS, steps=1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["judge.url=http://127.0.0.1:9/v1", "reward=gsm8k"], "reward=judge"),
        ([], "judge.url"),
        (["judge.url=http://127.0.0.1:9/v1", "judge.mode=pair"], "judge.mode.*pairs"),
        (["judge.url=http://127.0.0.1:9/v1", "judge.rubric=[{txt: a}]"], "txt"),
        (["judge.url=127.0.0.1:9"], "http://"),
    ],
)
def test_settings_that_cannot_judge_are_refused_before_the_run(given: list[str], arguments: list[str], named: str) -> None:
    result = train(*given, *arguments, "steps=1", "name=refused")
    assert result.exit_code != 0
    assert re.search(named, result.output.replace("\n", " ")), result.output
    assert not Path("runs/refused/metrics.jsonl").exists()
