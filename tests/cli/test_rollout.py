"""`ludic rollout` writes what `ludic sft` reads: the episodes that meet a condition, with their
tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.training.rollouts.log import read_rollouts

NETWORK = ["network.hidden_size=32", "network.num_heads=2", "network.num_kv_heads=1", "network.intermediate_size=32"]
EASY = ["threads=1", "task.args={digits: 3, right: 1.0, backwards: 0.0}"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sometimes sorts three digits correctly."""
    folder = tmp_path_factory.mktemp("sft")
    settings = ["rows=800", "batch_size=64", "epochs=6", "heldout=0.1", f"output={folder}", "name=run"]
    result = CliRunner().invoke(app, ["sft", *EASY, *NETWORK, *settings])
    assert result.exit_code == 0, result.output
    return folder / "run" / "model"


def play(model: Path, out: Path, *arguments: str) -> dict[str, Any]:
    """Play and return the counts."""
    settings = ["rollout.prompts=8", "rollout.group_size=4", f"model={model}", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, ["rollout", "sort", *EASY, *settings, *arguments])
    assert result.exit_code == 0, result.output
    counts: dict[str, Any] = json.loads(result.stdout)
    return counts


def test_kept_episodes_can_be_trained_on(model: Path, tmp_path: Path) -> None:
    good = play(model, tmp_path / "good.jsonl", "--episodes", "96", "--keep", "reward>0")
    everything = play(model, tmp_path / "all.jsonl", "--episodes", "96")
    assert 0 < good["kept"] < good["episodes"] == everything["kept"] == 96
    assert good["reward"] == pytest.approx(good["kept"] / 96) == everything["reward"]
    kept, played = read_rollouts(tmp_path / "good.jsonl"), read_rollouts(tmp_path / "all.jsonl")
    assert all(rollout.total_reward == 1.0 and rollout.steps[0].trace for rollout in kept)
    traces = [rollout.steps[0].trace for rollout in played if rollout.total_reward > 0]
    assert [rollout.steps[0].trace for rollout in kept] == traces  # equal seeds play equal episodes

    arguments = [
        "threads=1",
        f"data={tmp_path / 'good.jsonl'}",
        f"model={model}",
        f"output={tmp_path}",
        "name=more",
        "epochs=1",
        "--json",
    ]
    result = CliRunner().invoke(app, ["sft", *arguments])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)["data"]
    assert data["samples"] + data["heldout_samples"] == good["kept"]
    assert data["trained_tokens"] == 4 * data["samples"]  # three digits and the end token


def test_episodes_are_rounded_up_to_whole_groups(model: Path, tmp_path: Path) -> None:
    assert play(model, tmp_path / "some.jsonl", "--episodes", "38")["episodes"] == 40
    groups: dict[str, int] = {}
    for rollout in read_rollouts(tmp_path / "some.jsonl"):
        group = rollout.meta["request_meta"]["group_id"]
        groups[group] = groups.get(group, 0) + 1
    assert set(groups.values()) == {4}


def test_no_episode_need_be_kept(model: Path, tmp_path: Path) -> None:
    assert play(model, tmp_path / "none.jsonl", "--episodes", "4", "--keep", "reward>1")["kept"] == 0
    assert (tmp_path / "none.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--keep", "reward>0 or 1"], "at character 10"),
        (["--keep", "score>0"], "no number 'score'; it has reward"),
        (["rollout.prompt=1"], "did you mean rollout.prompts"),
        (["model=null"], "give model=DIRECTORY"),
    ],
)
def test_an_invalid_argument_is_a_one_line_error_and_writes_nothing(
    model: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    out = tmp_path / "out.jsonl"
    command = ["rollout", "sort", *EASY, f"model={model}", "rollout.prompts=1", "rollout.group_size=2", "--episodes", "2"]
    result = CliRunner().invoke(app, [*command, "--out", str(out), *arguments])
    assert result.exit_code in (1, 2)
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert not out.exists()


def test_an_existing_file_is_never_overwritten(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    result = CliRunner().invoke(app, ["rollout", f"model={model}", "--out", str(out)])
    assert result.exit_code == 2
    assert "exists already" in result.stderr
    assert out.read_text() == "mine\n"
