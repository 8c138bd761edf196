"""Runs that over-sample or filter groups: what they log."""

import json
from pathlib import Path

import pytest
from commands import metrics_of
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
    assert "answers are up to 1 policy versions old" in result.output
    lines = [line for line in metrics_of(tmp_path / "run") if line["phase"] == "reinforce"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["train/played_rollouts"] == 8 for line in lines)
    assert sum(line["groups/rejected"] for line in lines) > 0
    assert all(line["groups/lag_max"] <= 1 and line["train/policy_lag"] <= 1 for line in lines)
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 4 * 8
