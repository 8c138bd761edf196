"""`ludic status` on folders as running, finished and killed runs leave them."""

import json
import os
import re
import time

import pytest
from typer.testing import CliRunner

from ludic.cli import status
from ludic.cli.app import app
from ludic.cli.status import describe, format_duration, read_status
from ludic.errors import MissingExtraError
from ludic.launch.state import LaunchState, ProcessState
from ludic.recipes.processes import QueueSection
from ludic.runs.actors.queue import make_run_id, open_queue
from ludic.training.queue.base import Work

NOW = 1_790_000_000.0


@pytest.fixture
def run(tmp_path):
    """A run at step 7 with a complete and an incomplete checkpoint."""
    (tmp_path / "config.yaml").write_text("place: {actors: 0}\n")
    (tmp_path / "progress.json").write_text(json.dumps({"phase": "reinforce"}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n{"step": 7, "phase": "reinforce"}\n{"step": 8')
    for name in ("step_000005", "step_000007", ".unfinished_step_000009"):
        folder = tmp_path / "checkpoints" / "reinforce" / name
        folder.mkdir(parents=True)
        if name != "step_000007":
            (folder / "manifest.json").write_text("{}")
            os.utime(folder, (NOW - 300, NOW - 300))
    return tmp_path


def launch(run, **facts):
    processes = [
        ProcessState("trainer", "trainer", "running", pid=11, host="one", since=NOW - 30),
        ProcessState(
            "actor0",
            "actor",
            "waiting",
            since=NOW - 1,
            restarts=2,
            last_end={"time": NOW - 1, "code": None, "signal": 9, "text": "actor0 was ended by SIGKILL after 3.0 s"},
        ),
    ]
    LaunchState(10, "one", "ray", NOW - 40, **{"beat": NOW - 2, "processes": processes, **facts}).write(run)


def lines(run):
    return describe(read_status(run, now=NOW), now=NOW)


def test_a_run_of_one_process_shows_its_step_and_checkpoint(run):
    assert lines(run) == [
        f"{run}: reinforce, step 7",
        f"checkpoint: {run}/checkpoints/reinforce/step_000005, 5 min ago",
        "processes: one, without a supervisor",
    ]


def test_the_processes_of_a_launch_are_a_table(run):
    launch(run)
    assert lines(run)[2:] == [
        "supervisor: process 10 on one, ray, at work, seen 2 s ago",
        "NAME     ROLE     STATE    FOR   RESTARTS  PROCESS    LAST END",
        "trainer  trainer  running  30 s  0         11 on one",
        "actor0   actor    waiting  1 s   2                    actor0 was ended by SIGKILL after 3.0 s",
    ]


def test_a_dead_supervisor_is_named_and_an_ended_one_is_not_dead(run):
    launch(run, beat=NOW - 300)
    assert re.search(f"silent for 5 min: .*`ludic train --resume {run}`", lines(run)[2])
    assert CliRunner().invoke(app, ["status", str(run)]).exit_code == 1
    launch(run, beat=NOW - 300, exit_status=75)
    assert lines(run)[2].endswith("ended with status 75")
    assert CliRunner().invoke(app, ["status", str(run)]).exit_code == 0


def test_json_has_the_same_facts(run):
    launch(run, beat=time.time())
    result = CliRunner().invoke(app, ["status", str(run), "--json"])
    assert result.exit_code == 0
    content = json.loads(result.output)
    assert (content["step"], content["phase"]) == (7, "reinforce")
    assert [process["restarts"] for process in content["launch"]["processes"]] == [0, 2]


@pytest.fixture
def queue(run):
    """The queue of the run, with its settings."""
    (run / "config.yaml").write_text("place: {actors: 2}\nqueue: {url: null, order: exact}\n")
    log = open_queue(QueueSection(), run)
    log.claim("trainer", run=make_run_id(run))
    yield log
    log.disconnect()


def test_the_queue_of_a_run_with_actors_is_a_line(run, queue):
    queue.offer("trainer", [Work(number, 0) for number in range(3)])
    for actor in ("actor0", "actor1"):
        lease = queue.lease(actor)
    assert queue.deliver(lease, b"x" * 200_000)
    entry = queue.read(None, limit=1)[0]
    queue.set_aside(entry, "a reason")
    said = lines(run)[2]
    assert said.startswith("queue: 1 entries (0.2 MB) kept, 2 outstanding, of which 1 are leased (actor0), the oldest for ")
    assert said.endswith(" s; set aside 1, taken over 0")
    queue.close("trainer")
    assert lines(run)[2] == "queue: closed, the trainer is done; set aside 1, taken over 0"
    content = json.loads(CliRunner().invoke(app, ["status", str(run), "--json"]).output)
    assert content["queue"]["is_closed"] is True


def test_a_queue_that_does_not_answer_is_said_without_its_password(run, queue, monkeypatch):
    pytest.importorskip("redis")
    monkeypatch.setattr(status, "QUEUE_S", 0.2)
    monkeypatch.setenv("LUDIC_QUEUE_URL", "redis://:hunter2@127.0.0.1:1/0")
    said = lines(run)[2]
    assert said.startswith("queue: ")
    assert "redis://***@127.0.0.1:1" in said
    assert "hunter2" not in said


def test_a_queue_that_cannot_be_opened_is_said_in_its_line(run, queue, monkeypatch):
    for address in ("http://:hunter2@host", "hunter2@host:6379"):
        monkeypatch.setenv("LUDIC_QUEUE_URL", address)
        said = lines(run)
        assert said[2].startswith("queue: ")
        assert "redis://" in said[2]
        assert "hunter2" not in "".join(said)
    monkeypatch.setenv("LUDIC_QUEUE_URL", "redis://host")
    monkeypatch.setattr(status, "open_queue", without_redis)
    assert re.search(r"queue: .*`pip install 'ludic-rl\[redis\]'`", lines(run)[2])
    assert len(lines(run)) == len(said)


def without_redis(*_, **__):
    raise MissingExtraError.for_extra("redis", "redis")


def test_a_run_without_actors_or_before_them_has_no_queue(run):
    (run / "config.yaml").write_text("place: {actors: 0}\nqueue: {url: null}\n")
    make_run_id(run)
    assert read_status(run, now=NOW).queue is None
    (run / "config.yaml").write_text("place: {actors: 2}\nqueue: {url: null}\n")
    assert read_status(run, now=NOW).queue is None
    assert not (run / "queue.sqlite").exists()
    (run / "config.yaml").write_text("data: rows.jsonl\n")  # of another command
    assert read_status(run, now=NOW).queue is None


def test_a_folder_that_is_no_run_is_an_error(tmp_path):
    result = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert result.exit_code == 1
    assert "is not the folder of a run" in result.output


def test_durations_are_readable():
    shown = [format_duration(seconds) for seconds in (0.4, 119, 300, 7200, 90_000, 200_000)]
    assert shown == ["0 s", "119 s", "5 min", "2.0 h", "25.0 h", "2.3 d"]
