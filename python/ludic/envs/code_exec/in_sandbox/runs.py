"""Forks a child that compiles or runs a program, and says what became of it."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from typing import NoReturn

from ludic.envs.code_exec.in_sandbox.leftovers import delete_files, end_programs
from ludic.envs.code_exec.in_sandbox.process_control import JSON
from ludic.envs.code_exec.in_sandbox.program import become_program, compile_program, run_program
from ludic.envs.code_exec.in_sandbox.watch import KEPT_OUTPUT, Watch

ENDED_ITS_HANDLER: JSON = {
    "status": "killed",
    "stdout": "",
    "stderr": "\nstopped: it ended or stopped the process that watched it\n",
    "exit_code": 137,
    "duration_ms": 0.0,
    "cpu_ms": 0.0,
    "peak_bytes": 0,
    "message": None,
    "line": None,
    "column": None,
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
    if watch.printed_too_much():
        stopped = watch.stop_for_output()
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
