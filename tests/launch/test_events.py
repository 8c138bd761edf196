"""The log of events, to which several processes write and which a killed one may leave torn."""

import json
import tempfile
import threading
from pathlib import Path

import pytest
from events import read_events
from hypothesis import given, strategies as st

from ludic.errors import CheckpointError
from ludic.launch.state import LaunchState, ProcessState, read_launch
from ludic.launch.supervisor import EventLog

FACTS = st.dictionaries(st.sampled_from(["name", "tail", "code"]), st.none() | st.integers() | st.text())


@given(st.lists(FACTS, max_size=5), st.binary(max_size=20))
def test_what_is_written_is_read_whatever_a_killed_process_left(rows, torn):
    with tempfile.TemporaryDirectory() as folder:
        check_written_lines(Path(folder) / "events.jsonl", rows, torn)


def check_written_lines(path, rows, torn):
    path.write_bytes(torn)
    log = EventLog(path, now=lambda: 12.5)
    for row in rows:
        log.write("start", **row)
    assert list(read_events(path)) == [{"time": 12.5, "event": "start", **row} for row in rows]


def test_lines_of_several_writers_do_not_mix(tmp_path):
    path = tmp_path / "events.jsonl"

    def write(number):
        for _ in range(200):
            EventLog(path).write("end", tail=str(number) * 1000)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = list(read_events(path))
    assert len(events) == 800
    assert all(len(set(event["tail"])) == 1 for event in events)


def test_a_full_disk_costs_events_and_no_run(tmp_path, caplog):
    log = EventLog(tmp_path / "missing" / "events.jsonl")
    log.write("start")
    log.write("end")
    assert [record.getMessage().count("events are not recorded") for record in caplog.records] == [1]


def test_a_run_that_was_never_launched_has_no_state(tmp_path):
    assert read_launch(tmp_path) is None


def test_the_state_comes_back_as_written_and_damage_is_named(tmp_path):
    state = LaunchState(1, "here", "local", 2.0, 3.0, None, [ProcessState("a", "actor", last_end={"code": 1})])
    state.write(tmp_path)
    assert read_launch(tmp_path) == state
    (tmp_path / "launch.json").write_text(json.dumps({"pid": 1}))
    with pytest.raises(CheckpointError, match=r"launch\.json is damaged"):
        read_launch(tmp_path)
