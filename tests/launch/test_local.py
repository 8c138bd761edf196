"""Processes on this machine: they end with their place, however that ends, and with all that they
started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import is_running, wait_for_end

import ludic
from ludic.errors import ConfigError, LaunchError
from ludic.launch.local import LocalPlace
from ludic.launch.process import Ended, Process, Started

SLEEP = ("python", "-S", "-c", "import time; time.sleep(600)")
FAMILY = "echo $$; sleep 600 & echo $!; setsid sleep 601 & echo $!; wait"
"""A shell with one child in its process group and one in a session of its own, as torchrun starts
its ranks. It prints the three process ids."""
STUBBORN = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
POLITE = """
import signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
GUARDED = """
import os, socket, sys
from ludic.launch import guard

search = guard._descendants
guard._descendants = lambda: print("searched", flush=True) or search()

def start(link):
    if child := os.fork():
        return child
    os.system(sys.argv[1])
    os._exit(3)

link, _held = socket.socketpair()
guard.end_like(guard.guard(link, os.getppid(), start))
"""
PARENT = """
import os, sys, time
from pathlib import Path
from ludic.launch.local import LocalPlace
from ludic.launch.process import Process

place = LocalPlace(Path(sys.argv[1]))
place.start(Process("family", "actor", ("sh", "-c", sys.argv[2])))
fork = os.fork() if sys.argv[3] == "forks" else None
if fork == 0:
    time.sleep(600)
print(fork or 0, flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path):
    place = LocalPlace(tmp_path, gpus=[])
    yield place
    place.close()


def shell(name, script, **options):
    return Process(name, "actor", ("sh", "-c", script), **options)


def read_until(place, kind, timeout_s=30.0):
    """All reports up to a poll that has one of this kind."""
    reports, deadline = [], time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        reports += place.poll()
        if any(isinstance(report, kind) for report in reports):
            return reports
        time.sleep(0.005)
    raise AssertionError(f"no {kind.__name__} within {timeout_s} s, but {reports}")


def wait_for(place, kind):
    """The first report of this kind."""
    return next(report for report in read_until(place, kind) if isinstance(report, kind))


def wait_for_lines(path, count, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return lines
        time.sleep(0.005)
    raise AssertionError(f"{path} has fewer than {count} lines")


@pytest.mark.parametrize(
    ("script", "code", "number"),
    [("exit 0", 0, None), ("exit 75", 75, None), ("kill -9 $$", None, 9), ("kill -TERM $$", None, 15)],
)
def test_the_end_of_a_process_is_reported_once_as_it_was(place, script, code, number):
    place.start(shell("a", f"echo out; echo error >&2; {script}"))
    started, ended = read_until(place, Ended)  # a slow reader gets both at once
    assert isinstance(started, Started)
    assert started.name == "a"
    assert (ended.code, ended.signal, ended.tail) == (code, number, "out\nerror")
    assert place.poll() == []
    assert place.stop(["a"], 0.0) == []


def test_a_process_ends_with_all_that_it_started(place, tmp_path):
    """Even with what has a session of its own and does not hear SIGTERM."""
    place.start(shell("family", FAMILY))
    leader, *others = map(int, wait_for_lines(tmp_path / "workers" / "family.log", 3))
    os.kill(leader, signal.SIGKILL)
    assert wait_for(place, Ended).signal == signal.SIGKILL
    assert not any(map(is_running, others))


@pytest.mark.parametrize(("command", "searches"), [("true", False), ("setsid sleep 600 & echo $!", True)])
def test_processes_are_searched_for_only_if_some_are_left(command, searches):
    """A search reads /proc of all processes of the machine."""
    done = subprocess.run([sys.executable, "-c", GUARDED, command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "searched" in done.stdout) == (3, searches), done.stderr
    assert not any(is_running(int(line)) for line in done.stdout.splitlines() if line.isdigit())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_process_ends_with_either_half_of_its_guard(place, tmp_path, depth):
    """A process of Ray that ends kills its children: the outer half."""
    place.start(shell("family", FAMILY))
    family = [int(line) for line in wait_for_lines(tmp_path / "workers" / "family.log", 3)]
    half = family[0]
    for _ in range(depth):
        half = int(Path(f"/proc/{half}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(half, signal.SIGKILL)
    assert all(map(wait_for_end, family))
    assert wait_for(place, Ended).signal == signal.SIGKILL


@pytest.mark.parametrize("forks", ["forks", "alone"])
def test_children_and_grandchildren_end_with_their_parent(tmp_path, forks):
    """The parent is killed with SIGKILL, and a fork of it, which holds its files, lives on."""
    command = [sys.executable, "-S", "-c", PARENT, str(tmp_path), FAMILY, forks]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(ludic.__file__).parents[1]), *sys.path])}
    parent = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    fork = int(parent.stdout.readline())
    family = [int(line) for line in wait_for_lines(tmp_path / "workers" / "family.log", 3)]
    try:
        assert all(map(is_running, family))
        parent.kill()
        assert all(wait_for_end(pid, 30.0) for pid in family)
        assert fork == 0 or is_running(fork)
    finally:
        for pid in [*family, fork]:
            if pid and is_running(pid):
                os.kill(pid, signal.SIGKILL)
        parent.kill()
        parent.communicate()


def test_a_polite_stop_lets_a_process_save(place, tmp_path):
    place.start(Process("saver", "trainer", ("python", "-S", "-c", POLITE)))
    wait_for_lines(tmp_path / "workers" / "saver.log", 1)
    (ended,) = place.stop(["saver"], 30.0)
    assert (ended.code, ended.tail) == (143, "ready\nsaved")


def test_what_ignores_a_stop_is_killed_after_the_grace_period(place, tmp_path):
    place.start(Process("deaf", "actor", ("python", "-S", "-c", STUBBORN)))
    wait_for_lines(tmp_path / "workers" / "deaf.log", 1)
    (ended,) = place.stop(["deaf"], 0.1)
    assert ended.signal == signal.SIGKILL
    assert ended.seconds < 30


def test_asking_sends_the_signal_to_the_process_alone(place, tmp_path):
    place.start(shell("asked", "trap 'echo heard; exit 7' INT; echo ready; while :; do sleep 0.01; done"))
    wait_for_lines(tmp_path / "workers" / "asked.log", 1)
    place.ask("asked", signal.SIGINT)
    place.ask("nobody", signal.SIGINT)
    assert wait_for(place, Ended).code == 7


def test_closing_a_place_ends_everything_and_reports_it(tmp_path):
    place = LocalPlace(tmp_path, gpus=[])
    for name in ("a", "b"):
        place.start(Process(name, "actor", SLEEP))
    pids = [report.pid for report in place.poll()]
    assert sorted(ended.name for ended in place.close(5.0)) == ["a", "b"]
    assert not any(map(is_running, pids))
    assert place.poll() == place.close() == []


def test_a_flood_of_output_does_not_block_and_the_error_shows_its_end(place, tmp_path):
    place.start(shell("flood", "yes 0123456789012345678901234567890123456789 | head -c 8000000; echo the reason; exit 1"))
    ended = wait_for(place, Ended)
    assert ended.code == 1
    assert ended.tail.endswith("the reason")
    assert len(ended.tail) <= 4096
    assert (tmp_path / "workers" / "flood.log").stat().st_size > 8_000_000


def test_the_tail_is_of_the_last_attempt_and_the_log_has_all(place, tmp_path):
    for number in (1, 2):
        place.start(shell("a", f"echo attempt {number}"))
        assert wait_for(place, Ended).tail == f"attempt {number}"
    assert (tmp_path / "workers" / "a.log").read_text() == "attempt 1\nattempt 2\n"


def test_a_long_log_is_moved_aside_when_the_process_starts_again(place, tmp_path, monkeypatch):
    monkeypatch.setattr("ludic.launch.local.ROTATE_BYTES", 5)
    for _ in range(2):
        place.start(shell("a", "echo 123456"))
        wait_for(place, Ended)
    assert sorted(path.name for path in (tmp_path / "workers").iterdir()) == ["a.log", "a.log.1"]


def test_a_process_gets_its_variables_its_interpreter_and_the_loopback_address(place):
    code = "import os, sys; print(os.environ['OWN'], sys.argv[1], sys.executable)"
    place.start(Process("a", "actor", ("python", "-S", "-c", code, "tcp://{host:a}:80"), env={"OWN": "1"}))
    assert wait_for(place, Ended).tail == f"1 tcp://127.0.0.1:80 {sys.executable}"


def test_a_command_that_does_not_exist_is_an_error_that_names_it(place):
    with pytest.raises(LaunchError, match=r"a cannot be started: .*No such file.*'\./nothing'"):
        place.start(Process("a", "actor", ("./nothing",)))
    place.start(shell("a", "exit 0"))  # the name is free again
    with pytest.raises(LaunchError, match="a runs already"):
        place.start(shell("a", "exit 0"))


def test_gpus_are_lent_whole_or_shared_and_given_back(tmp_path):
    place = LocalPlace(tmp_path, gpus=["4", "5", "GPU-6"])
    show = 'echo "$CUDA_VISIBLE_DEVICES"; sleep 600'
    try:
        for name, gpus in (("half", 0.5), ("pair", 2), ("other", 0.5)):
            place.start(shell(name, show, gpus=gpus))
        lines = {name: wait_for_lines(tmp_path / "workers" / f"{name}.log", 1)[0] for name in ("half", "pair", "other")}
        assert lines["half"] == lines["other"]
        assert len({*lines["pair"].split(","), lines["half"]}) == 3
        with pytest.raises(LaunchError, match="more needs 1 GPUs, and 0 of 3 have room"):
            place.start(shell("more", show, gpus=1))
        place.stop(["pair"], 0.0)
        place.start(shell("more", show, gpus=1))
    finally:
        place.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a/b"}, "name of a process"),
        ({"role": ""}, "role of a process"),
        ({"argv": ()}, "one or more texts"),
        ({"argv": ("a\0b",)}, "one or more texts"),
        ({"cpus": -1}, r"cpus of a \(-1\) .*at least 0"),
        ({"cpus": float("nan")}, r"cpus of a \(nan\) .*at least 0"),
        ({"gpus": 1.5}, "must be a whole number"),
        ({"env": {"A=B": "1"}}, "'A=B' must be of letters"),
    ],
)
def test_a_process_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Process(**{"name": "a", "role": "actor", "argv": ("true",), **changes})
