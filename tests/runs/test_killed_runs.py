"""`benches.python.kills`, `killed_actors` and `killed_ranks`: states of a folder are read at each
change to it, a difference is found, and short forms of all three."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from benches.python.equal_runs import check_learning, compare, compare_training
from benches.python.folder_states import FolderStates
from benches.python.kills import preloading
from hypothesis import given

ROOT = Path(__file__).parents[2]
CHANGING = """
import ctypes, os, sys
folder = sys.argv[1]
ctypes.CDLL(None).stop_at_changes(folder.encode(), ctypes.c_long(int(sys.argv[2])))
os.mkdir(folder)
with open(os.path.join(folder, "a"), "wb", buffering=0) as file:
    file.write(b"four")
    os.fsync(file.fileno())
open(folder + "_beside", "wb").close()
os.rename(os.path.join(folder, "a"), os.path.join(folder, "b"))
handle = os.open(folder, os.O_RDONLY)
os.unlink("b", dir_fd=handle)
"""
STATES = [None, {}, {"a": b"fo"}, {"a": b"four"}, {"a": b"four"}, {"a": b"four"}, {"b": b"four"}]
"""The folder before mkdir, before the file is opened, in the middle of the write and at its end,
before fsync, before rename, before unlink."""


def read(folder: Path) -> dict[str, bytes] | None:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else None


def states_at_stops(tmp_path: Path, number: int) -> list[dict[str, bytes] | None]:
    """The folder at each stop of CHANGING, of all its threads."""
    folder = tmp_path / "run"
    command = [sys.executable, "-c", CHANGING, str(folder), str(number)]
    process = subprocess.Popen(command, env=preloading(tmp_path), stderr=subprocess.DEVNULL)
    states = []
    while os.WIFSTOPPED(status := os.waitpid(process.pid, os.WUNTRACED)[1]):
        states.append(read(folder))
        os.kill(process.pid, signal.SIGCONT)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert read(folder) == {}
    return states


def test_a_process_stops_at_each_change_to_its_files_and_in_the_middle_of_a_write(tmp_path: Path) -> None:
    assert states_at_stops(tmp_path, 0) == STATES


def test_a_process_stops_at_one_change(tmp_path: Path) -> None:
    assert states_at_stops(tmp_path, 3) == STATES[2:3]


names = st.text("ab.", min_size=1, max_size=2).filter(lambda name: name.strip("."))
trees = st.recursive(
    st.binary(max_size=4) | st.sampled_from(["target", "x/y"]),
    lambda tree: st.dictionaries(names, tree, max_size=3),
    max_leaves=6,
).filter(lambda tree: isinstance(tree, dict))


def make(tree: object, path: Path) -> None:
    if isinstance(tree, dict):
        path.mkdir()
        for name, part in tree.items():
            make(part, path / name)
    elif isinstance(tree, bytes):
        path.write_bytes(tree)
    else:
        path.symlink_to(str(tree))


@given(trees, trees)
def test_a_folder_gets_a_state_back_whatever_it_has_become(
    tmp_path_factory: pytest.TempPathFactory, before: object, after: object
) -> None:
    parent, states = tmp_path_factory.mktemp("states"), FolderStates()
    assert states.read(parent / "before") == ()
    make(before, parent / "before")
    make(after, parent / "after")
    found = states.read(parent / "before")
    states.write(found, parent / "after")
    assert states.read(parent / "after") == found
    make(before, parent / "again")
    assert states.read(parent / "again") == found
    states.write((), parent / "after")
    assert not (parent / "after").exists()


def write_run(folder: Path) -> Path:
    """A finished run of two steps."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    (folder / "summary.json").write_text('{"steps": 2, "mismatch": {"preflight": 0.1}, "wall_s": 1.5}')
    steps = [{"phase": "rl", "step": n, "train/loss": n / 3, "train/grad_norm": 1.0, "perf/step_s": n} for n in (1, 2)]
    episode = {"group_id": 1, "problem_id": "a", "episode_idx": 1, "policy_version": 1}
    rollouts = [
        {"id": os.urandom(4).hex(), "total_reward": 1.0, "steps": [], "meta": {**episode, "engine": {"sampling_seed": n}}}
        for n in (1, 2)
    ]
    for name, lines in (("metrics", steps), ("rollouts", rollouts)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def test_runs_that_differ_in_times_and_random_names_are_equal(tmp_path: Path) -> None:
    run, whole = write_run(tmp_path / "run"), write_run(tmp_path / "whole")
    change(run / "summary.json", "1.5", "2.5")
    change(run / "metrics.jsonl", '"perf/step_s": 1', '"perf/step_s": 7')
    assert compare(run, whole) == compare_training(run, whole) == []


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("model/model.safetensors", "weights", "weightz"),
        ("metrics.jsonl", "0.3333333333333333", "0.33333333333333337"),
        ("metrics.jsonl", '"step": 2', '"step": 1'),
        ("rollouts.jsonl", '"total_reward": 1.0', '"total_reward": 0.0'),
        ("rollouts.jsonl", '"sampling_seed": 2', '"sampling_seed": 1'),
    ],
)
def test_each_other_difference_is_found(tmp_path: Path, name: str, before: str, after: str) -> None:
    run, whole = write_run(tmp_path / "run"), write_run(tmp_path / "whole")
    change(run / name, before, after)
    assert compare(run, whole)
    assert compare_training(run, whole)


def test_a_file_that_is_missing_or_too_many_is_found(tmp_path: Path) -> None:
    run, whole = write_run(tmp_path / "run"), write_run(tmp_path / "whole")
    (run / ".unfinished_model").mkdir()
    (run / ".unfinished_model" / "part").touch()
    (run / "model" / "model.safetensors").unlink()
    assert compare(run, whole) == [
        "only in one of the two: .unfinished_model/part",
        "only in one of the two: model/model.safetensors",
    ]


def test_a_run_without_a_gradient_would_show_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    check_learning(run)
    change(run / "metrics.jsonl", '"train/grad_norm": 1.0', '"train/grad_norm": 0.0')
    with pytest.raises(RuntimeError, match=r"no gradient in \[\('rl', 1\)\] .*2 steps"):
        check_learning(run)


@pytest.mark.integration
def test_short_forms_of_all_kills_change_nothing(tmp_path: Path) -> None:
    """One process, which imports everything once."""
    script = """
from benches.python import killed_actors, killed_ranks, kills
kills.main("--kinds SFT --moments 1 --states 2 --changes 1 --jobs 1".split())
killed_actors.main("--kinds SQLite --runs 1".split())
killed_ranks.main("--kinds SFT --kills 2 --steps 6".split())
"""
    (tmp_path / "kills").mkdir()
    environment = {**preloading(tmp_path / "kills"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, (finished.stdout, finished.stderr)
    rows = [line.split(" | ") for line in finished.stdout.splitlines() if line.startswith(("| SFT", "| SQLite"))]
    assert len(rows) == 3
    assert all(row[-1] == "0 |" for row in rows)
