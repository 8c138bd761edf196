"""A supervisor with real processes on this machine."""

import os
import signal
import time
from contextlib import closing

from events import read_events
from processes import is_running

from ludic.launch.local import LocalPlace
from ludic.launch.process import Process
from ludic.launch.supervisor import Supervisor

ACTOR = Process("actor", "actor", ("sleep", "600"))


def started(folder):
    """(name, process id) of every start."""
    return [(event["name"], event["pid"]) for event in read_events(folder / "events.jsonl") if event["event"] == "start"]


def supervise(folder, trainer, on_tick):
    def sleep(seconds):
        time.sleep(seconds)
        on_tick(supervisor)

    processes = [Process("trainer", "trainer", ("sh", "-c", trainer), env={"RUN": str(folder)}), ACTOR]
    with closing(LocalPlace(folder, gpus=[])) as place:
        supervisor = Supervisor(place, processes, folder=folder, sleep=sleep, note=lambda text: None)
        return supervisor.run()


def test_killed_processes_run_again_and_the_run_ends_right(tmp_path):
    killed = []

    def kill_each_once(supervisor):
        running = dict(pair for pair in started(tmp_path) if is_running(pair[1]))
        if len(running) == 2 and len(killed) < 2:
            killed.append(["actor", "trainer"][len(killed)])
            os.kill(running[killed[-1]], signal.SIGKILL)
        elif len(running) == 2 and len(started(tmp_path)) == 4:
            (tmp_path / "done").touch()

    assert supervise(tmp_path, 'until [ -e "$RUN/done" ]; do sleep 0.01; done', kill_each_once) == 0
    assert [name for name, _ in started(tmp_path)] == ["trainer", "actor", *killed]
    assert not any(is_running(pid) for _, pid in started(tmp_path))


def test_sigterm_lets_the_trainer_save_and_ends_all(tmp_path):
    def terminate(supervisor):
        ready = (tmp_path / "workers" / "trainer.log").exists() and (tmp_path / "workers" / "trainer.log").read_text()
        if ready == "ready\n" and len(started(tmp_path)) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.01; done"
    assert supervise(tmp_path, trainer, terminate) == 143
    assert (tmp_path / "workers" / "trainer.log").read_text().startswith("ready\nsaved\n")
    assert not any(is_running(pid) for _, pid in started(tmp_path))
