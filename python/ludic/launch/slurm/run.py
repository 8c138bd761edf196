"""Runs a training job inside its allocation: starts the servers, waits until they are healthy,
trains, and ends everything.

A signal to `srun` kills its step. A trainer that is to save is therefore asked through the
controller, by the name of its step.
"""

from __future__ import annotations

import http.client
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ludic.errors import LaunchError
from ludic.launch.slurm.settings import SlurmSettings
from ludic.launch.slurm.steps import TRAIN, YOUNG_S, Allocation, Placement, Server, place, server_steps, training_step
from ludic.launch.supervisor import catch_stop_signals

POLL_S = 0.25
ASK_AGAIN_S = 2.0
CONTROL_S = 60.0
"""The deadline of a question to Slurm's controller."""
SERVER_STOP_S = 20.0
SECRET, HEADER = "LUDIC_SERVER_SECRET", "X-Ludic-Secret"
"""The secret that the servers of the job share with its trainer, and where requests have it."""
_YOUNG = re.compile(f"0:0[0-{YOUNG_S - 1}]")
"""The age of a step that `squeue` prints in its first `YOUNG_S` seconds."""
_EXIT = re.compile(r"srun: error: (\S+): tasks? \S+: (?:Exited with exit code (\d+)|(\w+))")

Step = subprocess.Popen[Any]
Servers = Sequence[tuple[Server, Step]]


def run_job(settings: SlurmSettings) -> int:
    """Run the job of this process. Returns the exit status of the first rank that failed, or
    1 if a server ended or was not healthy in time. Raises ConfigError if the GPUs are too few."""
    job_id = os.environ["SLURM_JOB_ID"]
    settings = settings.with_ports_of(job_id)
    placement = place(settings, find_allocation(settings, os.environ))
    commands, train = server_steps(settings, placement, job_id), training_step(settings, placement, job_id)
    for line in describe(placement):
        _say(line)
    os.environ[SECRET] = secrets.token_hex(32)  # one that another server may have too would not tell them apart
    stop = threading.Event()
    with catch_stop_signals(lambda _: stop.set()), _started(commands) as steps:
        servers = list(zip(placement.servers, steps, strict=True))
        fault = _wait_for_health(settings, servers, stop)
        if fault is not None:
            _say(fault)
            return 1
        if stop.is_set():
            return 128 + signal.SIGTERM
        return _train(settings, train, servers, stop, job_id)


def find_allocation(settings: SlurmSettings, environment: Mapping[str, str]) -> Allocation:
    """The nodes of the job, and the GPUs of each, which the settings say if Slurm does not."""
    listed = _ask("scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]).split()
    return Allocation(listed, int(environment.get("SLURM_GPUS_ON_NODE") or settings.gpus_per_node))


def describe(placement: Placement) -> list[str]:
    """The plan in words."""
    ranks, nodes = placement.ranks_per_node, ", ".join(placement.train_nodes)
    training = f"training: {ranks} rank{'s' if ranks > 1 else ''} on each of {nodes}{_on(placement.train_gpus)}"
    return [training, *(f"server: {server.url}{_on(server.gpus)}" for server in placement.servers)]


def find_status(errors: str, status: int) -> int:
    """The status of the first rank that failed. With several nodes srun returns the status of any
    of them, since it ends the others.

    >>> find_status("srun: error: n1: task 0: Exited with exit code 3", 143)
    3
    """
    first = _EXIT.search(errors)
    if first is None or status == 0:
        return status
    return int(first[2]) if first[2] else status


def _train(settings: SlurmSettings, command: Sequence[str], servers: Servers, stop: threading.Event, job_id: str) -> int:
    trainer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
    errors: list[str] = []
    reader = threading.Thread(target=_copy, args=(trainer.stderr, errors), daemon=True)
    reader.start()
    dead: tuple[Server, int] | None = None
    ending = _Ending(settings.stop_before_end_s, job_id, trainer)
    while trainer.poll() is None:
        dead = dead or _find_ended(servers)
        if stop.is_set() or dead is not None:
            ending.go_on("asked to stop" if dead is None else _say_ended(*dead))
        time.sleep(POLL_S)
    reader.join(SERVER_STOP_S)
    return 1 if dead is not None else find_status("".join(errors), _shell_status(trainer.returncode))


class _Ending:
    """Asks the trainer to save and end, and kills it after `patience_s`."""

    def __init__(self, patience_s: float, job_id: str, trainer: Step) -> None:
        self._patience_s, self._job_id, self._trainer = patience_s, job_id, trainer
        self._deadline: float | None = None
        self._is_asked, self._next_ask = False, 0.0

    def go_on(self, reason: str) -> None:
        """Do the next round of work. It is called until the trainer has ended."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._patience_s
            _say(f"{reason}; the trainer saves and ends")
        if not self._is_asked and now >= self._next_ask:
            try:
                self._is_asked = _ask_to_save(self._job_id)
            except LaunchError as error:  # a busy controller
                _say(str(error))
            self._next_ask = now + ASK_AGAIN_S
        if now > self._deadline:
            _say(f"the trainer has not ended within {self._patience_s:g} s and is killed")
            self._trainer.terminate()
            self._deadline = now + self._patience_s


def _ask_to_save(job_id: str) -> bool:
    """SIGTERM to every rank of the training. Whether it was sent: the controller lists a step some
    time after its `srun` has begun, and before its processes have."""
    listed = _ask("squeue", "--noheader", "--steps", "--jobs", job_id, "--format", "%i %M %j")
    fields = [line.split() for line in listed.splitlines()]
    steps = [step for step, age, *name in fields if name == [TRAIN] and not _YOUNG.fullmatch(age)]
    for step in steps:  # not by `scancel` itself: it asks all nodes of the job, and fails where the step is not
        _ask("scancel", "--ctld", "--signal=TERM", step)
    return bool(steps)


def _wait_for_health(settings: SlurmSettings, servers: Servers, stop: threading.Event) -> str | None:
    """Wait until every server answers. Returns what went wrong; None if nothing did, or if the job
    is asked to stop. Another process may answer at the port: ours ends then, or has another
    secret."""
    deadline = time.monotonic() + settings.health_timeout_s
    for where, _ in servers:
        while not (healthy := is_healthy(where.host, where.port)) or _find_ended(servers):
            if stop.is_set():
                return None
            if ended := _find_ended(servers):
                answers = f", and something else answers at {where.url}" if healthy else ""
                return _say_ended(*ended) + answers
            if time.monotonic() > deadline:
                return f"the server {where.url} was not healthy within {settings.health_timeout_s:g} s; its log is in {settings.logs}"
            stop.wait(POLL_S)
        # It refuses the secret of another job, which paths that it does not know need too.
        if _get(where.host, where.port, "/ludic/secret", {HEADER: os.environ[SECRET]}) == http.HTTPStatus.UNAUTHORIZED:
            return (
                f"what answers at {where.url} refuses the secret of this job: it is another's server; set another --server-port"
            )
        _say(f"healthy: {where.url}")
    return None


def _find_ended(servers: Servers) -> tuple[Server, int] | None:
    """A server that has ended, and its status."""
    return next(((where, step.returncode) for where, step in servers if step.poll() is not None), None)


def is_healthy(host: str, port: int) -> bool:
    """Whether `GET /health` is answered by 200. Proxies are not asked."""
    return _get(host, port, "/health", {}) == http.HTTPStatus.OK


def _get(host: str, port: int, path: str, headers: dict[str, str]) -> int | None:
    """The status of the answer; None without one."""
    connection = http.client.HTTPConnection(host, port, timeout=5.0)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


@contextmanager
def _started(commands: Sequence[Sequence[str]]) -> Iterator[list[Step]]:
    """The processes of the commands; at exit those that run are ended."""
    running: list[Step] = []
    try:
        running.extend(subprocess.Popen(command) for command in commands)
        yield running
    finally:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(SERVER_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(SERVER_STOP_S)


def _copy(stream: Any, lines: list[str]) -> None:
    for line in stream:
        lines.append(line)
        sys.stderr.write(line)
        sys.stderr.flush()


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONTROL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{' '.join(command)} failed: {error}") from error
    if done.returncode:
        raise LaunchError(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _shell_status(code: int) -> int:
    return code if code >= 0 else 128 - code


def _on(gpus: Sequence[int]) -> str:
    return f", GPUs {', '.join(map(str, gpus))}" if gpus else ""


def _say_ended(server: Server, status: int) -> str:
    return f"the server {server.url} ended with status {_shell_status(status)}"


def _say(text: str) -> None:
    print(f"ludic: {text}", flush=True)
