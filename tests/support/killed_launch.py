"""Runs a `ludic` command whose processes a launcher starts, and kills some of them.

python tests/support/killed_launch.py RUN KILLS ARGUMENT...

KILLS is a list such as `actor0@2,trainer@5`: actor0 gets SIGKILL once step 2 of the reinforcement
is logged, and the trainer after step 5. The exit status is that of the command.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from forked_run import wait_for_step


def kill(run, name):
    launch = json.loads((run / "launch.json").read_text())
    os.kill(next(process["pid"] for process in launch["processes"] if process["name"] == name), signal.SIGKILL)


class Command(subprocess.Popen):
    @property
    def is_running(self):
        return self.poll() is None


def play(run, kills, arguments):
    with Command([sys.executable, "-m", "ludic.cli", *arguments]) as command:
        for name, _, step in (text.partition("@") for text in kills.split(",") if text):
            wait_for_step(run, int(step), command)
            kill(run, name)
        return command.wait()


if __name__ == "__main__":
    sys.exit(play(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
