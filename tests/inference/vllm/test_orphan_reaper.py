"""What sees to it that no server outlives the process that started it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fake_vllm
import pytest
from processes import is_running, until_gone

import ludic
from ludic.inference.vllm import orphan_reaper as reaper_module
from ludic.inference.vllm.launch import free_port, start_vllm_server, stop_vllm_server
from ludic.inference.vllm.orphan_reaper import OrphanReaper

STARTER = """
import os, signal, sys, time
from pathlib import Path
from ludic.inference.vllm import launch

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored by whatever a process starts
proc = launch.start_vllm_server("tiny", "127.0.0.1", launch.free_port(), python=sys.argv[1], stream_output=False)
facts = Path(sys.argv[2])
while not facts.exists() or not facts.read_text():
    time.sleep(0.01)
fork = os.fork() if sys.argv[3] == "forks" else None
if fork == 0:
    time.sleep(600)
print(proc.pid, launch._REAPERS[proc.pid].pid, fork or 0, flush=True)
time.sleep(600)
"""
SLEEPER = "import signal, sys; print(flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"


@pytest.fixture
def sleeper():
    """Starts a process that leads a group, and is ended if the test did not."""
    running = []

    def begin(code=SLEEPER):
        running.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True))
        running[-1].stdout.readline()
        return running[-1]

    yield begin
    for proc in running:
        proc.kill()
        proc.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("forks", ["forks", "alone"])
def test_a_server_ends_with_the_process_that_started_it_however_that_ends(tmp_path, number, forks):
    """Not even a fork of it that lives on keeps the server."""
    facts = tmp_path / "facts.json"
    env = {**os.environ, "FAKE_VLLM": "deaf", "FAKE_VLLM_FACTS": str(facts), "PYTHONPATH": str(Path(ludic.__file__).parents[1])}
    python = fake_vllm.install(tmp_path / "venv")
    command = [sys.executable, "-c", STARTER, python, str(facts), forks]
    starter = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    server, watcher, fork = map(int, starter.stdout.readline().split())
    started = [server, json.loads(facts.read_text())["child"], watcher]
    try:
        assert all(map(is_running, started))
        starter.send_signal(number)
        assert starter.wait() == -number
        assert all(map(until_gone, started))
        assert fork == 0 or is_running(fork)
    finally:
        for pid in [fork, *started]:
            if pid and is_running(pid):
                os.kill(pid, signal.SIGKILL)
        starter.kill()
        starter.communicate()


def test_no_reaper_is_left_of_a_server_that_was_stopped(tmp_path):
    from ludic.inference.vllm import launch

    python = fake_vllm.install(tmp_path / "venv")
    env = {"FAKE_VLLM": "deaf", "FAKE_VLLM_FACTS": str(tmp_path / "facts.json")}
    proc = start_vllm_server("tiny", "127.0.0.1", free_port(), python=python, env=env, stream_output=False)
    watcher = launch._REAPERS[proc.pid]
    assert is_running(watcher.pid)
    stop_vllm_server(proc, timeout_s=0.1)
    assert not is_running(watcher.pid)
    assert proc.pid not in launch._REAPERS
    assert watcher not in reaper_module._ACTIVE


def test_a_server_that_cannot_be_started_leaves_no_reaper(tmp_path):
    before = set(reaper_module._ACTIVE)
    python = fake_vllm.install(tmp_path / "venv")
    with pytest.raises(FileNotFoundError):
        start_vllm_server("tiny", "127.0.0.1", free_port(), python=python, log_path=tmp_path / "no" / "log")
    assert before == reaper_module._ACTIVE


def test_a_group_that_does_not_end_when_asked_is_ended_after_the_grace(sleeper):
    stubborn = sleeper(STUBBORN)
    watcher = OrphanReaper(grace_s=0.2)
    watcher.watch(stubborn.pid)
    watcher.close()
    assert watcher._process.wait(60) == 0
    assert stubborn.wait(60) == -signal.SIGKILL


def test_a_reaper_that_was_dismissed_touches_nothing(sleeper):
    proc = sleeper()
    watcher = OrphanReaper(grace_s=0.2)
    watcher.watch(proc.pid)
    watcher.dismiss()
    watcher.dismiss()
    assert watcher._process.returncode == 0
    assert proc.poll() is None


def test_a_reaper_leaves_with_the_last_of_its_group(sleeper, monkeypatch):
    """The number may come to mean another group."""
    monkeypatch.setattr(reaper_module, "CHECK_S", 0.01)
    proc = sleeper()
    read, write = os.pipe()
    os.write(write, b"%d\n" % proc.pid)
    try:
        proc.kill()
        proc.wait()
        reaper_module.reap_at_end(read, 60.0)  # returns, though the pipe is open
    finally:
        os.close(read)
        os.close(write)


def test_a_reaper_that_was_never_told_a_group_ends_none(monkeypatch):
    signals = []
    monkeypatch.setattr(os, "killpg", lambda *sent: signals.append(sent))
    for said in (b"", b"12", b"-1\n"):
        read, write = os.pipe()
        os.write(write, said)
        os.close(write)
        reaper_module.reap_at_end(read, 0.0)
        os.close(read)
    assert signals == []
