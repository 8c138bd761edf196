"""Runs a trainer and two actors under a supervisor on a Ray cluster, and kills some of them.

As a script it takes a JSON object: `folder`; `address` of the cluster; `options` for `ray.init`;
`kills`, a list of what to kill, one after the other: `trainer`, `actor0`, `actor1` (the process),
`holder of NAME` (Ray's actor), `node of NAME` (a machine of the cluster), or `driver` (this
process, which prints the ids of the others before); `wait` kills nothing and never ends. It prints
a JSON object: the exit status, the seconds until each killed process ran again, and which of all
processes are left at the end.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from events import read_events
from processes import is_running

from ludic.launch.process import Process
from ludic.launch.ray import RayPlace
from ludic.launch.supervisor import Supervisor

WORK = ("sh", "-c", "echo {host:trainer} $$; sleep 600 & echo $!; wait")
TRAINER = ("sh", "-c", 'trap "exit 143" TERM; echo ready; until [ -e "$DONE" ]; do sleep 0.05; done')


def make_processes(folder, cpus=1):
    done = str(folder / "done")
    trainer = Process("trainer", "trainer", TRAINER, cpus=cpus, env={"DONE": done}, restarts=1000)
    return [trainer, *(Process(f"actor{i}", "actor", WORK, cpus=cpus, restarts=1000) for i in range(2))]


class Killer:
    """The supervisor's `sleep`: kills the next process once all run, and ends the trainer when all
    kills are done."""

    def __init__(self, folder, kills):
        self.folder, self.left, self.seconds, self.pids = folder, list(kills), [], set()
        self.killed = None

    def __call__(self, seconds):
        time.sleep(seconds)
        starts = [event for event in read_events(self.folder / "events.jsonl") if event["event"] == "start"]
        self.pids |= {event["pid"] for event in starts}
        running = {event["name"]: event["pid"] for event in starts if is_running(event["pid"])}
        if self.killed is not None:
            name, when, target = self.killed
            again = [start["time"] for start in starts if start["name"] == name and start["time"] > when]
            if not again:
                return
            self.seconds.append([target, round(again[0] - when, 2)])
            self.killed = None
        if len(running) < 3:
            return
        if not self.left:
            (self.folder / "done").touch()
            return
        if self.left[0] == "wait":
            return
        target = self.left.pop(0)
        if target == "driver":
            print(json.dumps(sorted(self.pids | children_of_actors(self.folder))), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        name = target.split()[-1]
        pid = running[name]
        for _ in range({"holder": 3, "node": 4}.get(target.split()[0], 0)):
            pid = parent_of(pid)  # process -> its guard's two -> Ray's worker -> the node's raylet
        self.killed = name, time.time(), target
        os.kill(pid, signal.SIGKILL)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def words_of_actors(folder):
    return [path.read_text().split() for path in (folder / "workers").glob("actor*.log")]


def children_of_actors(folder):
    return {int(word) for words in words_of_actors(folder) for word in words if word.isdigit()} - {os.getpid(), 1}


def play(folder, address, options, kills):
    began = time.monotonic()
    place = RayPlace(make_processes(folder), folder, address=address, **options)
    ready = time.monotonic() - began
    killer = Killer(folder, kills)
    try:
        status = Supervisor(place, make_processes(folder), folder=folder, place_name="ray", sleep=killer, window_s=1.0).run()
    finally:
        place.close()
    return {
        "status": status,
        "ready_s": round(ready, 1),
        "seconds": killer.seconds,
        "left": [pid for pid in killer.pids | children_of_actors(folder) if is_running(pid)],
        "hosts": sorted({words[0] for words in words_of_actors(folder)}),
    }


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    print(json.dumps(play(Path(task["folder"]), task["address"], task["options"], task["kills"])))
