"""What `ludic runs` and `ludic view` read of a run."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from run_folders import make_run

from ludic.cli.runs import read_runs, show, view_command
from ludic.errors import CheckpointError, ConfigError
from ludic.runs.lock import RunLock, is_locked
from ludic.runs.reading import PROGRESS, SUMMARY, find_runs, list_differences, read_run
from ludic.runs.view.page import build_page


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


@pytest.mark.parametrize(("command", "rate"), [("train-rm", "eval_pairwise_accuracy"), ("dpo", "eval_rewards/accuracies")])
def test_a_run_on_pairs_stands_by_its_accuracy(tmp_path, command, rate):
    sampled = {"answers": 8, "finished": {"mean": 1.0}}  # what `ludic dpo` also measures
    run = make_run(tmp_path / "run", command=command, before=sampled, after={"eval_loss": 0.5, rate: 0.75, **sampled})
    summary = json.loads((run / "summary.json").read_text()) | {"before": sampled, "after": sampled, rate: 0.75}
    (run / "summary.json").write_text(json.dumps(summary))
    assert read_run(run).held_out == (rate, None, 0.75)


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


def test_settings_are_compared_between_runs_of_one_command(tmp_path, capsys):
    """Regression test: runs of two commands differ in nearly all settings, since each has others;
    the list of them ended "and 142 more"."""
    alike = [make_run(tmp_path / name, lr=lr) for name, lr in (("a", 0.1), ("b", 0.2))]
    show(read_runs(alike)[0])
    assert capsys.readouterr().out.split("Settings that differ\n")[1].split() == ["RUN", "trainer.lr", "a", "0.1", "b", "0.2"]

    other = make_run(tmp_path / "c", command="sft", lr=0.3)
    other.joinpath("config.yaml").write_text("recipe: sft\ntrainer:\n  lr: 0.3\n  other: 1\nrows: 5\n")
    show(read_runs([*alike, other])[0])
    shown = capsys.readouterr().out
    assert shown.count("Settings that differ") == 1
    expected = ["RUN", "trainer.lr", "a", "0.1", "b", "0.2"]
    assert shown.split("Settings that differ between the runs of `ludic train`\n")[1].split() == expected


def test_the_page_without_a_run_is_that_of_the_newest_that_can_be_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("oldest", "older", "newest")):
        run = make_run(tmp_path / "runs" / name)
        os.utime(run / "config.yaml", (1000 + age, 1000 + age))
    (tmp_path / "runs" / "newest" / "progress.json").write_text("{")
    assert view_command([], out=None, episodes=10) == 0
    said = capsys.readouterr()
    assert said.out.startswith("runs/older/report.html: 1 run")
    assert "newest/progress.json" in said.err
    assert "the newest run before it is shown" in said.err
    with pytest.raises(CheckpointError, match="newest"):
        view_command([tmp_path / "runs" / "newest"], out=None, episodes=10)
    for name in ("oldest", "older"):
        (tmp_path / "runs" / name / "progress.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"newest.*older.*oldest"):
        view_command([], out=None, episodes=10)


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


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["before", "after", "wall", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([("summary.json", SUMMARY), ("progress.json", PROGRESS)]), st.data(), VALUES)
def test_a_file_with_values_of_any_type_is_shown_or_named_as_damaged(tmp_path, file, data, value):
    """Never a traceback: the page is built, or the error says which file and key."""
    (name, types), run = file, tmp_path / "run"
    if not run.exists():
        make_run(run)
        (run / "whole").mkdir()
        for each in ("summary.json", "progress.json"):
            (run / "whole" / each).write_text((run / each).read_text())
    for each in ("summary.json", "progress.json"):
        (run / each).write_text((run / "whole" / each).read_text())
    key = data.draw(st.sampled_from(sorted(types)))
    content = json.loads((run / name).read_text())
    (run / name).write_text(json.dumps({**content, key: value}))
    records, damaged = read_runs([run])
    assert [name in line and (key in line or "wall" in line) for line in damaged] == [True] * (1 - len(records))
    build_page(records, episodes=10)
    show(records)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"before": [1]}, r"before \(\[1\]\) must be an object"),
        ({"solved_at": "1"}, r'solved_at \("1"\) must be a number'),
        ({"intervals": {"after": {"loss": [1]}}}, r"intervals\.after .*two numbers for each rate"),
    ],
)
def test_a_summary_of_wrong_types_is_an_error_that_names_the_key(tmp_path, content, message):
    run = make_run(tmp_path / "run")
    (run / "summary.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        read_run(run)
