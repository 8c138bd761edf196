"""Reads requests and answers them, one after another."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from typing import Any

from ludic.envs.code_exec.in_sandbox.leftovers import ALONE, delete_files, end_programs
from ludic.envs.code_exec.in_sandbox.runs import run_child

# What most programs import: imported here once, they cost a fork nothing.
import bisect, collections, functools, heapq, itertools, math, random, re, string  # noqa: E401, F401  # isort: skip

JSON = dict[str, Any]
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def main(places: list[str]) -> None:
    """`places` are the folders that programs can write to; the first is where they start."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # with no handler at all, no program can signal process 1
    control(PR_SET_DUMPABLE, 0)  # programs of the same user cannot open this process's files in /proc
    if not ALONE:
        control(PR_SET_CHILD_SUBREAPER, 1)
    send(answers, {"ready": True, "python": f"{sys.version_info[0]}.{sys.version_info[1]}", "alone": ALONE})
    while (request := receive(requests)) is not None:
        if request["op"] == "clean":
            end_programs()
            send(answers, {"clean": delete_files(places)})
        else:
            send(answers, run_child(request, requests, places))


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
            os._exit(0)


def control(option: int, value: int) -> None:
    """prctl; where there is none, nothing."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
