"""Reads requests and answers them, one after another."""

from __future__ import annotations

import gc
import json
import math
import os
import select
import shutil
import signal
import struct
import sys
import time

from ludic.envs.code_exec.in_sandbox.leftovers import ALONE, delete_files, end_programs, stat_fields
from ludic.envs.code_exec.in_sandbox.runs import ENDED_ITS_HANDLER, run_child
from ludic.envs.code_exec.in_sandbox.watch import (
    HOST_IS_GONE,
    JSON,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    PR_SET_THP_DISABLE,
    control,
    install_filter,
    longest_s,
)

# What most programs import: imported here once, they cost a fork nothing.
import bisect, collections, functools, heapq, itertools, random, re, string  # noqa: E401, F401  # isort: skip

LOOK_S = 0.1
"""How often a handler is looked at."""
GRACE_S = 10.0
"""How long a handler may take in addition to its program's time."""


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
    control(PR_SET_THP_DISABLE, 1)  # also for all processes that it forks
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
    """Fork a handler, wait for it, and return its exit status. It writes into a pipe how long each
    request may take before its program starts; one that is over that, or is stopped, is killed."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read_end)
            control(PR_SET_PDEATHSIG, signal.SIGKILL)
            control(PR_SET_CHILD_SUBREAPER, 1)
            status = handle(requests, answers, places, write_end)
        finally:
            os._exit(status)
    os.close(write_end)
    os.set_blocking(read_end, False)
    handler, deadline = os.pidfd_open(pid), math.inf
    while not select.select([handler], [], [], LOOK_S)[0]:
        if (longest := last_number(read_end)) is not None:
            deadline = time.monotonic() + GRACE_S + longest
        if time.monotonic() > deadline or stat_fields(pid)[0] == b"T":  # its program has stopped it
            os.kill(pid, signal.SIGKILL)
    os.close(handler)
    os.close(read_end)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def last_number(end: int) -> float | None:
    """The last of the numbers that were written into a pipe, or None if there are none."""
    try:
        written = os.read(end, 1 << 16)
    except BlockingIOError:
        return None
    return struct.unpack("d", written[-8:])[0] if written else None


def handle(requests: int, answers: int, places: list[str], times: int) -> int:
    """Answer the requests of one program, to the last of them. Returns the handler's exit
    status."""
    program = None
    while True:
        request = receive(requests)
        if request is None:
            return HOST_IS_GONE
        os.write(times, struct.pack("d", longest_s(request)))
        if request["op"] == "clean":
            end_programs()
            answer: JSON = {"clean": delete_files(places)}
        elif program not in (None, request["code"]):
            answer = {"again": True}  # this process's memory is the other program's to read
        else:
            program = request["code"]
            answer = run_child(request, requests, places)
        send(answers, answer)
        if not request.get("more") or "again" in answer:
            return 0
        os.write(times, struct.pack("d", math.inf))


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
