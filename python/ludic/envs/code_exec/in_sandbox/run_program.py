"""Runs the programs of a sandbox: reads requests and answers them one after another, forks a child
that becomes a program, compiles it or runs it, and says what became of it."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import json
import linecache
import math
import os
import resource
import select
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
import types
from _sitebuiltins import Quitter
from typing import NoReturn

from ludic.envs.code_exec.in_sandbox.leftovers import ALONE, delete_files, end_programs, stat_fields
from ludic.envs.code_exec.in_sandbox.watch import (
    HOST_IS_GONE,
    JSON,
    KEPT_OUTPUT,
    MEGABYTE,
    MOST_PROCESSES,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    PR_SET_THP_DISABLE,
    Watch,
    control,
    install_filter,
    longest_s,
)

# What most programs import: imported here once, they cost a fork nothing.
import bisect, collections, functools, heapq, itertools, random, re, string  # noqa: E401, F401  # isort: skip

ENDED_ITS_HANDLER: JSON = {
    "status": "killed",
    "stdout": "",
    "stderr": "\nstopped: it ended or stopped the process that watched it\n",
    "exit_code": 137,
    "duration_ms": 0.0,
    "cpu_ms": 0.0,
    "peak_bytes": 0,
}
"""The answer for a program that does this: its test has failed."""


def run_child(request: JSON, requests: int, places: list[str]) -> JSON:
    """Fork a child that compiles or runs the code, or both, wait for its end, and return what it
    did."""
    started = time.monotonic()
    (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
    child_ends, own_ends = [stdin, stdout, stderr], (to_stdin, from_stdout, from_stderr)
    compiles = request["op"] == "compile" or bool(request.get("compile_first"))
    from_compiler = -1
    if compiles:
        from_compiler, compiler = os.pipe()
        child_ends.append(compiler)
    pid = os.fork()
    if pid == 0:
        be_child(request, child_ends, places[0], compiles)
    for end in child_ends:
        os.close(end)
    watch = Watch(pid, own_ends, request, requests, places)
    try:
        stopped = watch.wait()
        _, ending, used = os.wait4(pid, 0)
        orphans = end_programs()
        watch.read_rest()
    finally:
        for end in watch.open_ends:
            os.close(end)
    clean = delete_files(places)
    stopped = watch.stop_for_output() or stopped
    code = os.waitstatus_to_exitcode(ending)
    out, err = (bytes(watch.output[number][:KEPT_OUTPUT]).decode("utf-8", "replace") for number in (1, 2))
    answer = {
        "status": stopped or status_of(code, err),
        "stdout": out,
        "stderr": err + watch.note,
        "exit_code": 128 - code if code < 0 else code,
        "duration_ms": (time.monotonic() - started) * 1e3,
        "cpu_ms": (used.ru_utime + used.ru_stime + orphans) * 1e3,
        "peak_bytes": max(used.ru_maxrss << 10, watch.peak_bytes),
        "clean": clean,
    }
    return {**answer, "compiled": compiler_answer(from_compiler, answer)} if compiles else answer


def be_child(request: JSON, child_ends: list[int], place: str, compiles: bool) -> NoReturn:
    try:
        become_program(request, child_ends, place)
        compiled = compile_program(request["code"]) if compiles else None
        if request["op"] == "run" and (compiled is not None or not compiles):
            run_program(request["code"], compiled)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(125)


def compiler_answer(end: int, answer: JSON) -> JSON:
    """What the compiler has written, or, if it did not get that far, what it ended with."""
    with open(end, "rb") as pipe:
        written = pipe.read()
    if written:
        found = json.loads(written)
    elif answer["status"] in ("timeout", "sandbox_error"):
        found = {"status": answer["status"], "message": "compiling took too long"}
    else:
        found = {"status": "unknown_error", "message": f"the compiler ended with {answer['status']}"}
    return {"message": None, "line": None, "column": None, "duration_ms": answer["duration_ms"], **found}


def status_of(code: int, stderr: str) -> str:
    """The status of a program that ended by itself, from its exit code (negative: a signal)."""
    if code == 0:
        return "success"
    if code == -signal.SIGXCPU:
        return "timeout"
    last = stderr.rstrip().rpartition("\n")[2]
    if code == -signal.SIGKILL or last.startswith("MemoryError"):
        return "memory_exceeded"
    return "killed" if code in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP) else "runtime_error"


SOLUTION = "solution.py"
OVERHEAD_MB = 96
"""Address space of the interpreter itself."""
LONGEST_FILE = 64 << 20


VERDICT = 3
"""Where the process says whether the program is valid. It is closed before the program runs."""
LONGEST_MESSAGE = 1000


def become_program(request: JSON, child_ends: list[int], place: str) -> None:
    """Give the process its own pipes, limits, folder and environment, and nothing else.
    `child_ends` become its stdin, stdout, stderr and VERDICT."""
    os.setsid()
    control(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with its handler
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, end in enumerate(child_ends):
        os.dup2(end, number)
    os.closerange(len(child_ends), 4096)
    timeout_s, memory_mb = request["timeout_s"], int(request.get("memory_mb") or 1024)
    limits = {
        resource.RLIMIT_CPU: int(timeout_s) + 2,  # a backstop: the first process stops it sooner
        resource.RLIMIT_AS: (memory_mb + OVERHEAD_MB) * MEGABYTE,
        resource.RLIMIT_STACK: min(memory_mb, 64) * MEGABYTE,
        resource.RLIMIT_FSIZE: LONGEST_FILE,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if ALONE:  # elsewhere it would count the user's other processes, too
        limits[resource.RLIMIT_NPROC] = MOST_PROCESSES
    for which, limit in limits.items():
        hard = resource.getrlimit(which)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (limit, limit))
    control(PR_SET_DUMPABLE, 1)  # so that /dev/stdin works
    with contextlib.suppress(OSError):
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, b"1000")  # where memory is short, the kernel ends a program, not who watches it
        os.close(score)
    os.environ.clear()
    os.environ.update({"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": place, "LANG": "C.UTF-8", **(request.get("env") or {})})
    os.chdir(place)
    sys.argv, sys.path[:] = [SOLUTION], [place, *sys.path[1:]]
    # As Python opens them; what the runner had is nothing that a program should get.
    for name, number, mode, errors in (
        ("stdin", 0, "r", "surrogateescape"),
        ("stdout", 1, "w", "surrogateescape"),
        ("stderr", 2, "w", "backslashreplace"),
    ):
        stream = open(number, mode, 1 if number == 2 else -1, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run_program(code: str, compiled: types.CodeType | None) -> NoReturn:
    """Run the program as `python solution.py` would, and end the process with its exit status.
    Without `compiled`, it is compiled first."""
    module = types.ModuleType("__main__")
    module.__file__ = SOLUTION
    for name in ("exit", "quit"):
        setattr(builtins, name, Quitter(name, "Ctrl-D"))
    sys.modules["__main__"] = module
    linecache.cache[SOLUTION] = (len(code), None, code.splitlines(keepends=True), SOLUTION)
    status = 0
    try:
        exec(compiled or compile(code, SOLUTION, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        status = exit_status(error.code)
    except BaseException as error:
        status = 1
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != SOLUTION:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python does at its end: joins the threads
        atexit._run_exitfuncs()
        module.__dict__.clear()  # closes the files that only the program knows
        gc.collect()
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
    except BaseException:
        traceback.print_exc()
        status = status or 120
    with contextlib.suppress(BaseException):
        sys.stderr.flush()
    os._exit(status)


def exit_status(code: object) -> int:
    """What Python makes of the argument of `sys.exit`."""
    if code is None or isinstance(code, int):
        return (code or 0) & 255
    print(code, file=sys.stderr)
    return 1


def compile_program(code: str) -> types.CodeType | None:
    """The program if it is valid. The finding goes to VERDICT, as JSON, which is then closed."""
    started, compiled = time.monotonic(), None
    found: JSON = {"status": "success"}
    try:
        compiled = compile(code, SOLUTION, "exec", dont_inherit=True)
    except SyntaxError as error:
        found = {"status": "syntax_error", "message": error.msg, "line": error.lineno, "column": error.offset}
    except BaseException as error:
        found = {"status": "unknown_error", "message": f"{type(error).__name__}: {error}"[:LONGEST_MESSAGE]}
    found["duration_ms"] = (time.monotonic() - started) * 1e3
    os.write(VERDICT, json.dumps(found).encode())
    os.close(VERDICT)
    return compiled


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
