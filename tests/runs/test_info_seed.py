"""Runs with InfoSeed: what they train, measure and write."""

import json
from pathlib import Path

import numpy as np
import pytest
from benches.python.info_seed import best_guess, is_above_chance, measure
from tiny_recipe import TINY
from typer.testing import CliRunner

from ludic.cli.app import app

SEEDED = [
    *TINY,
    "info_seed.num_seeds=2",
    "info_seed.coeff=0.1",
    "trainer.eval_every_n_steps=2",
    "trainer.minibatches_per_batch=1",
]


def test_a_run_trains_and_measures_seeded_answers(tmp_path: Path) -> None:
    watched = ["trainer.early_stopping_patience=9", "trainer.early_stopping_metric=eval_seed/pass_at_n"]
    watched += [
        "callbacks.keep_best=eval_seed/pass_at_n",
        "callbacks.stop.metric=eval_seed/pred_acc",
        "callbacks.stop.patience=9",
    ]
    result = CliRunner().invoke(app, ["train", "maxent", *SEEDED, *watched, f"output={tmp_path}", "name=run"])
    assert result.exit_code == 0, result.output
    assert "3 steps of 2 problems x 6 answers" in result.output
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "reinforce" and "train/loss" in line]
    assert len(steps) == 3
    assert all(line["train/seed/info_nce"] > 0 and line["train/played_rollouts"] == 12 for line in steps)
    [measured] = [line for line in lines if "eval_seed/pred_acc" in line]
    assert measured["eval/step"] == 2.0
    assert {"eval_seed/pass_at_n", "eval_seed/diversity_l2", "eval/sampled_reward"} <= measured.keys()
    written = sorted(path.name for path in (run / "seed_heatmaps").iterdir())
    assert written == [f"seed_heatmap_step{step}.json" for step in (0, 2, 3)]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["after"]["eval_seed/pass_at_n"] >= 0
    assert json.loads((run / "progress.json").read_text())["early_stopping"]["metric"] == "eval_seed/pass_at_n"
    best = json.loads((run / "checkpoints" / "reinforce" / "best.json").read_text())
    assert (best["metric"], best["value"]) == ("eval_seed/pass_at_n", measured["eval_seed/pass_at_n"])
    tags = [json.loads(line)["meta"]["request_meta"].get("seed_id") for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert tags[:6] == [None, None, None, None, 1, 2]


def test_the_best_guess_by_hand() -> None:
    """Question 1: the larger of .5 .1 and of .2 .6 are .5 + .6, over 2 seeds .55; .3 of each seed's
    answers are not listed. Question 2: equal seeds, (.5 + .5) / 2."""
    probabilities = np.array([[[0.5, 0.2], [0.1, 0.6]], [[0.5, 0.5], [0.5, 0.5]]])
    assert best_guess(probabilities) == pytest.approx((0.525, 0.525 + 0.15))


@pytest.mark.integration
def test_seeds_are_told_apart_above_chance(tmp_path: Path) -> None:
    """The short form of `benches.python.info_seed`: 20 of its 100 steps."""
    course = measure(tmp_path, seed=0, steps=20, samples=64)
    assert [point.step for point in course] == [0, 20]
    assert is_above_chance(course[-1])
    assert course[-1].pred_acc > course[0].pred_acc
