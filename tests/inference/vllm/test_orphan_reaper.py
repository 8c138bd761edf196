"""The reaper process, which ensures that no server outlives the process that started it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fake_vllm
import pytest
from processes import is_running, wait_for_end

import ludic
from ludic.inference.servers.ports import free_port
from ludic.inference.vllm import orphan_reaper as reaper_module
from ludic.inference.vllm.launch import start_vllm_server, stop_vllm_server
from ludic.inference.vllm.orphan_reaper import OrphanReaper

STARTER = """
import os, signal, sys, time
from pathlib import Path
from ludic.inference.servers.ports import free_port
from ludic.inference.vllm import launch

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored by whatever a process starts
proc = launch.start_vllm_server("tiny", "127.0.0.1", free_port(), python=sys.argv[1], stream_output=False)
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
def start_sleeper():
    """Starts a process that leads a group. It is killed after the test if it still runs."""
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
def test_a_server_ends_with_its_parent_however_that_ends(tmp_path, number, forks):
    """Even a surviving fork of the parent does not keep the server alive."""
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
        assert all(map(wait_for_end, started))
        assert fork == 0 or is_running(fork)
    finally:
        for pid in [fork, *started]:
            if pid and is_running(pid):
                os.kill(pid, signal.SIGKILL)
        starter.kill()
        starter.communicate()


def test_a_stopped_server_leaves_no_reaper(tmp_path):
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


def test_a_group_that_ignores_sigterm_is_killed_after_the_grace_period(start_sleeper):
    stubborn = start_sleeper(STUBBORN)
    watcher = OrphanReaper(grace_s=0.2)
    watcher.watch(stubborn.pid)
    watcher.close()
    assert watcher._process.wait(60) == 0
    assert stubborn.wait(60) == -signal.SIGKILL


def test_a_dismissed_reaper_kills_nothing(start_sleeper):
    proc = start_sleeper()
    watcher = OrphanReaper(grace_s=0.2)
    watcher.watch(proc.pid)
    watcher.dismiss()
    watcher.dismiss()
    assert watcher._process.returncode == 0
    assert proc.poll() is None


def test_a_reaper_exits_with_the_last_process_of_its_group(start_sleeper, monkeypatch):
    """The process group id may later be reused."""
    monkeypatch.setattr(reaper_module, "CHECK_S", 0.01)
    proc = start_sleeper()
    read, write = os.pipe()
    os.write(write, b"%d\n" % proc.pid)
    try:
        proc.kill()
        proc.wait()
        reaper_module.reap_at_end(read, 60.0)  # returns although the pipe is open
    finally:
        os.close(read)
        os.close(write)


def test_a_reaper_without_a_group_kills_nothing(monkeypatch):
    signals = []
    monkeypatch.setattr(os, "killpg", lambda *sent: signals.append(sent))
    for said in (b"", b"12", b"-1\n"):
        read, write = os.pipe()
        os.write(write, said)
        os.close(write)
        reaper_module.reap_at_end(read, 0.0)
        os.close(read)
    assert signals == []
