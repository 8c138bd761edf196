"""Trainers and actors of a run as processes of their own, forked from a server that has already
imported everything that they need."""

import os
import signal
import sys
import time
from pathlib import Path

from forkserver import FORKSERVER

DEADLINE_S = 600.0


class Forked:
    """A `ludic` command in a process. As a context manager it is killed at the end."""

    def __init__(self, *arguments):
        self._process = FORKSERVER.Process(target=_run, args=([str(argument) for argument in arguments],))
        self._process.start()

    @property
    def is_running(self):
        return self._process.is_alive()

    def kill(self):
        """End it with SIGKILL."""
        assert self.is_running
        self._process.kill()
        self._process.join(DEADLINE_S)
        assert self._process.exitcode == -signal.SIGKILL

    def end(self, number=None):
        """Wait until it has ended, after sending it the signal `number` if there is one. Returns
        its exit status."""
        if number is not None:
            os.kill(self._process.pid, number)
        self._process.join(DEADLINE_S)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.join(DEADLINE_S)


def wait_for_step(run: Path, step: int, *running: Forked) -> None:
    """Wait until the run has logged this step of its reinforcement. All of `running` must run."""
    deadline = time.monotonic() + DEADLINE_S
    while f'"phase": "reinforce", "train/step": {step}' not in _read(run / "metrics.jsonl"):
        assert all(process.is_running for process in running), "a process has ended too early"
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.005)


def wait_until_exists(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.005)


def _read(path):
    return path.read_text() if path.exists() else ""


def _run(arguments):
    from ludic.cli.app import main

    sys.argv = ["ludic", *arguments]
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open until the process ends
    try:
        main()
    except SystemExit as exit_request:
        os._exit(int(exit_request.code or 0))
