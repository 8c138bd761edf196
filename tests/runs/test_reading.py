"""What `ludic runs` and `ludic view` read of a run."""

import pytest
from run_folders import make_run

from ludic.errors import CheckpointError, ConfigError
from ludic.runs.lock import RunLock, is_locked
from ludic.runs.reading import find_runs, list_differences, read_run


@pytest.mark.parametrize(
    ("progress", "status", "steps"),
    [
        ({}, "finished", 4),
        ({"phase": "reinforce", "steps": 0}, "interrupted", 4),  # killed: the last logged step counts
        ({"phase": "reinforce", "failed": "OSError: disk"}, "failed", 4),
    ],
)
def test_the_status_and_steps_of_a_run(tmp_path, progress, status, steps):
    record = read_run(make_run(tmp_path / "run", **progress))
    assert (record.status, record.steps, record.failed) == (status, steps, progress.get("failed"))
    after = 0.75 if status == "finished" else None  # that in summary.json is of the run before steps were added
    assert record.held_out == ("sampled_reward", 0.25, after)
    assert list(record.intervals) == (["before", "after"] if status == "finished" else ["before"])
    assert record.wall_s == 61.5


def test_a_run_that_a_process_works_on_is_running(tmp_path):
    run = make_run(tmp_path / "run", phase="reinforce", failed="an earlier attempt")
    lock = RunLock(run)
    assert (read_run(run).status, read_run(run).failed) == ("running", None)
    lock.release()
    assert not is_locked(run)
    assert read_run(run).status == "failed"
    RunLock(run).release()  # a look does not keep the lock


def test_settings_are_compared_by_value_and_names_are_left_out(tmp_path):
    runs = [read_run(make_run(tmp_path / name, lr=lr, algorithm="grpo")) for name, lr in (("a", 0.1), ("b", 0.2), ("c", 0.1))]
    assert list_differences(runs) == {"trainer.lr": [0.1, 0.2, 0.1]}
    assert list_differences(runs[:1]) == {}


def test_a_folder_of_runs_and_a_run_are_found(tmp_path):
    run = make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / ".unfinished_b")
    (tmp_path / "runs" / "eval-a").mkdir()
    assert find_runs(tmp_path / "runs") == find_runs(run) == [run]
    with pytest.raises(ConfigError, match="there is no folder"):
        find_runs(tmp_path / "nowhere")


@pytest.mark.parametrize(("file", "content"), [("progress.json", "{"), ("config.yaml", "[1]"), ("summary.json", "[]")])
def test_damaged_files_are_an_error_that_names_them(tmp_path, file, content):
    run = make_run(tmp_path / "run")
    (run / file).write_text(content)
    with pytest.raises((CheckpointError, ConfigError), match=file):
        read_run(run)
