"""Reads requests and answers them, one after another."""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import struct
import sys
import time

from ludic.envs.code_exec.in_sandbox.leftovers import ALONE, delete_files, end_programs, stat_fields
from ludic.envs.code_exec.in_sandbox.process_control import (
    JSON,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    control,
    install_filter,
)
from ludic.envs.code_exec.in_sandbox.runs import ENDED_ITS_HANDLER, run_child
from ludic.envs.code_exec.in_sandbox.watch import HOST_IS_GONE, longest_s

# What most programs import: imported here once, they cost a fork nothing.
import bisect, collections, functools, heapq, itertools, math, random, re, string  # noqa: E401, F401  # isort: skip

LOOK_S = 0.1
"""How often a handler is looked at."""
GRACE_S = 10.0
"""How long a handler may take beside its program's time."""


def main(places: list[str], system_call_filter: bytes = b"") -> None:
    """`places` are the folders that programs can write to; the first is where they start. A filter
    of system calls, if there is one, holds from here on."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # with no handler at all, no program can signal process 1
    control(PR_SET_DUMPABLE, 0)  # programs of the same user cannot open this process's files in /proc
    control(PR_SET_CHILD_SUBREAPER, 1)
    if system_call_filter:
        install_filter(system_call_filter)
    send(answers, {"ready": True, "python": f"{sys.version_info[0]}.{sys.version_info[1]}", "alone": ALONE})
    gc.collect()
    gc.freeze()  # a program that collects garbage looks at its own objects alone
    while True:
        select.select([requests], [], [])
        status = run_handler(requests, answers, places)
        if status == HOST_IS_GONE:
            break
        if status != 0:
            end_programs()
            send(answers, {**ENDED_ITS_HANDLER, "clean": delete_files(places)})
    if not ALONE:  # otherwise all processes and places end with this one
        end_programs()
        delete_files(places)
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


def run_handler(requests: int, answers: int, places: list[str]) -> int:
    """Fork a handler of one request, wait for it, and return its exit status. It writes its
    deadline into a pipe before its program starts; one that is stopped is killed then."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            control(PR_SET_PDEATHSIG, signal.SIGKILL)
            control(PR_SET_CHILD_SUBREAPER, 1)
            status = handle(requests, answers, places, write_end)
        finally:
            os._exit(status)
    os.close(write_end)
    written = os.read(read_end, 8)
    os.close(read_end)
    deadline = time.monotonic() + GRACE_S + (struct.unpack("d", written)[0] if len(written) == 8 else 0.0)
    handler = os.pidfd_open(pid)
    while not select.select([handler], [], [], LOOK_S)[0]:
        if time.monotonic() > deadline or stat_fields(pid)[0] == b"T":  # its program has stopped it
            os.kill(pid, signal.SIGKILL)
    os.close(handler)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def handle(requests: int, answers: int, places: list[str], deadline_end: int) -> int:
    """Read a request and answer it. Returns the handler's exit status."""
    request = receive(requests)
    if request is None:
        return HOST_IS_GONE
    os.write(deadline_end, struct.pack("d", longest_s(request)))
    os.close(deadline_end)
    if request["op"] == "clean":
        end_programs()
        answer: JSON = {"clean": delete_files(places)}
    else:
        answer = run_child(request, requests, places)
    send(answers, answer)
    return 0


def receive(end: int) -> JSON | None:
    """The next request, or None at the end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(end, 1 << 20)
        if not part:
            return None
        line += part
    return json.loads(line)


def send(end: int, answer: JSON) -> None:
    rest = memoryview(json.dumps(answer).encode() + b"\n")
    while rest:
        try:
            rest = rest[os.write(end, rest) :]
        except BrokenPipeError:
            os._exit(HOST_IS_GONE)
