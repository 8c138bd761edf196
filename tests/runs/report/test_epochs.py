"""What a run over pairs measured, step by step."""

import json

import pytest

from ludic.runs.directory import DPODirectory, Progress, RMDirectory
from ludic.runs.epochs import measured_by_step

LINES = [
    {"phase": "warm_up", "step": 1, "train/loss": 1.0, "eval/accuracy": 0.1},
    {"phase": "rm", "step": 1, "train/loss": 1.0},
    {"phase": "rm", "step": 2, "train/loss": 0.9},
    {"phase": "rm", "step": 2, "eval/accuracy": 0.6},
    {"phase": "rm", "step": 4, "eval/accuracy": 0.7},
]


@pytest.fixture
def directory(tmp_path):
    found = RMDirectory(tmp_path)
    found.metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return found


def test_the_final_measurement_is_at_the_last_step(directory):
    progress = Progress(phase="done", steps=5)
    assert measured_by_step(directory, progress, {"eval_accuracy": 0.8}, "accuracy") == [(2, 0.6), (4, 0.7), (5, 0.8)]


def test_after_early_stopping_it_is_at_the_step_that_was_kept(directory):
    progress = Progress(phase="done", steps=5, early_stopping={"kept_step": 4})
    assert measured_by_step(directory, progress, {"eval_accuracy": 0.7}, "accuracy") == [(2, 0.6), (4, 0.7)]


def test_a_stopped_run_has_only_what_it_measured_on_the_way(directory):
    assert measured_by_step(directory, Progress(phase="rm", steps=4), {}, "accuracy") == [(2, 0.6), (4, 0.7)]


def test_steps_are_the_lines_of_a_phase_with_a_loss(directory):
    assert [line["step"] for line in directory.read_steps("rm")] == [1, 2]


def test_the_folders_of_both_commands_have_their_pairs_in_the_same_files(tmp_path):
    ours, theirs = vars(RMDirectory(tmp_path)), vars(DPODirectory(tmp_path))
    shared = ("picture", "reliability", "margins", "pairs", "heldout_pairs")
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
