"""How a run ended, and what was lost in it, as summary.json says it."""

import json

import pytest

from ludic.runs.directory import DONE, Progress, RMDirectory, RunDirectory, SFTDirectory
from ludic.runs.report.summary import count_samples, find_status, write_failure

RECIPE = {"model": "a/model", "algorithm": "grpo", "seed": 3}


@pytest.mark.parametrize(
    ("phase", "failed", "status"),
    [
        ("done", None, "finished"),
        ("reinforce", None, "interrupted"),
        ("warm_up", None, "interrupted"),
        ("reinforce", "ValueError: x", "failed"),
    ],
)
def test_the_status_follows_from_the_phase_and_the_error(phase, failed, status):
    assert find_status(Progress(phase=phase, failed=failed)) == status


def test_shares_of_samples_are_counted_again():
    """Step 1: .25 of 8 answers were cut, which is 2, and none to max_seq_len. Step 2: 1/3 of 3,
    which is 1, and 2/3 to max_seq_len; one more was dropped."""
    lines = [
        {"train/num_samples": 8.0, "train/completion_truncated_rate": 0.25, "train/seq_len_truncated_rate": 0.0},
        {
            "train/num_samples": 3.0,
            "train/completion_truncated_rate": 1 / 3,
            "train/seq_len_truncated_rate": 2 / 3,
            "train/seq_len_truncated_empty": 1.0,
        },
    ]
    assert count_samples(lines) == {"trained": 11, "answers_cut": 3, "cut_to_max_seq_len": 2, "cut_to_nothing": 1}
    assert count_samples([]) == dict.fromkeys(("trained", "answers_cut", "cut_to_max_seq_len", "cut_to_nothing"), 0)


@pytest.mark.parametrize(
    ("kind", "phase", "algorithm"),
    [(RunDirectory, "reinforce", "grpo"), (SFTDirectory, "sft", "sft"), (RMDirectory, "rm", "bradley_terry")],
)
def test_a_run_that_fails_says_so_with_what_is_known_of_it(tmp_path, kind, phase, algorithm):
    directory = kind(tmp_path)
    directory.metrics.write_text(
        json.dumps({"step": 1, "phase": phase, "train/loss": 1.0, "train/num_samples": 4, "train/num_failed_episodes": 2}) + "\n"
        + json.dumps({"step": 2, "phase": phase, "train/loss": 1.0, "train/num_samples": 4}) + "\n"
    )  # fmt: skip
    directory.summary.write_text('{"status": "finished", "after": {"loss": 0.1}}')
    progress = Progress(
        phase, kind.command, recipe=RECIPE, versions={"ludic": "1"}, failed="OSError: disk", seconds={"wall": 2.0}
    )
    write_failure(directory, progress)
    summary = json.loads(directory.summary.read_text())
    assert {
        name: summary[name] for name in ("status", "failed", "model", "algorithm", "versions", "steps", "seed", "wall_s")
    } == {
        "status": "failed",
        "failed": "OSError: disk",
        "model": "a/model",
        "algorithm": algorithm,
        "versions": {"ludic": "1"},
        "steps": 2,
        "seed": 3,
        "wall_s": 2.0,
    }
    assert (summary["episodes"]["failed"], summary["samples"]["trained"]) == (2, 8)
    assert "after" not in summary


@pytest.mark.parametrize(("before", "status"), [("finished", "finished"), ("failed", "failed"), (None, "failed")])
def test_a_finished_run_whose_report_fails_again_keeps_its_results(tmp_path, before, status):
    directory = RunDirectory(tmp_path)
    if before is not None:
        directory.summary.write_text(json.dumps({"status": before, "failed": "an earlier error", "after": {"loss": 0.1}}))
    write_failure(directory, Progress(DONE, failed="OSError: disk"))
    summary = json.loads(directory.summary.read_text())
    assert (summary["status"], "after" in summary) == (status, status == "finished")
    assert summary["failed"] == ("an earlier error" if status == "finished" else "OSError: disk")
