"""Runs that over-sample or filter groups: what they log, and that several ranks share them."""

import json
from pathlib import Path

import pytest
from commands import metrics_of
from ranked_commands import REWARD, Ranks, alone, largest_difference, with_sgd
from tiny_recipe import TINY
from typer.testing import CliRunner

from ludic.cli.app import app


@pytest.mark.integration
def test_a_run_replaces_rejected_groups_and_says_how_old_answers_are(tmp_path: Path) -> None:
    settings = [
        *TINY,
        "rollout.log_every=1",
        "rollout.group_filter=byte_filters:even_sum",
        "rollout.over_sampling_factor=2",
        "steps=4",
    ]
    result = CliRunner().invoke(app, ["train", *settings, f"output={tmp_path}", "name=run"])
    assert result.exit_code == 0, result.output
    assert "up to 1 policy versions old" in result.output
    lines = [line for line in metrics_of(tmp_path / "run") if line["phase"] == "reinforce"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["train/played_rollouts"] == 8 for line in lines)
    assert sum(line["groups/rejected"] for line in lines) > 0
    assert all(line["groups/lag_max"] <= 1 and line["train/policy_lag"] <= 1 for line in lines)
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 4 * 8


@pytest.mark.integration
@pytest.mark.parametrize(
    ("setting", "rejects", "lag"),
    [("rollout.group_filter=byte_filters:even_sum", True, 0), ("rollout.over_sampling_factor=2", False, 1)],
)
def test_two_ranks_train_the_groups_of_one_process(setting: str, rejects: bool, lag: int, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(24)))
    settings = [*TINY, *REWARD, f"data={data}", setting, "rollout.order=submission", "rollout.prompts=3", "rollout.log_every=1"]
    for name, world_size, work in (("one", 1, alone), ("two", 2, with_sgd)):
        arguments = [*settings, f"output={tmp_path}", f"name={name}"]
        with Ranks(tmp_path / f"log-{name}", world_size, "train", *arguments, work=work) as run:
            assert run.wait() == [0] * world_size, run.read_all()
    one, two = (tmp_path / name for name in ("one", "two"))
    facts = [facts_of_groups(run) for run in (one, two)]
    assert facts[1] == facts[0]
    assert (any(step["groups/rejected"] for step in facts[1]), max(step["groups/lag_max"] for step in facts[1])) == (rejects, lag)
    assert problems_of(two) == problems_of(one)
    if lag == 0:  # else the weights behind an answer depend on timing
        assert largest_difference(one, two) < 1e-6


def facts_of_groups(run: Path) -> list[dict[str, float]]:
    """What a run logged of its groups, by step."""
    lines = [line for line in metrics_of(run) if line["phase"] == "reinforce"]
    assert all(line["train/grad_norm"] > 0 for line in lines)
    names = ("step", "train/played_rollouts", "groups/rejected", "groups/lost", "groups/kept", "groups/lag_max")
    return [{name: line[name] for name in names} for line in lines]


def problems_of(run: Path) -> list[dict[str, str]]:
    """Problem and group of each rollout that a run trained, in order."""
    return [json.loads(line)["meta"]["request_meta"] for line in (run / "rollouts.jsonl").read_text().splitlines()]
