"""Forks a child that compiles or runs a program, and says what became of it."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback

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
    """Fork a child that compiles or runs the code, wait for its end, and return what it did."""
    started = time.monotonic()
    (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
    child_ends, own_ends = (stdin, stdout, stderr), (to_stdin, from_stdout, from_stderr)
    pid = os.fork()
    if pid == 0:
        try:
            become_program(request, child_ends, places[0])
            (compile_program if request["op"] == "compile" else run_program)(request["code"])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(125)
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
    if any(len(output) > KEPT_OUTPUT for output in watch.output.values()):
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
    return compile_answer(answer) if request["op"] == "compile" else answer


def compile_answer(answer: JSON) -> JSON:
    """The answer to `compile`, from the run of `compile_program`."""
    found = {"status": "success"}
    if answer["status"] == "timeout":
        found = {"status": "timeout", "message": "compiling took too long"}
    elif answer["status"] != "success":
        found = {"status": "unknown_error", "message": f"the compiler ended with {answer['status']}"}
    elif answer["stdout"]:
        found = json.loads(answer["stdout"])
    kept = {"duration_ms": answer["duration_ms"], "clean": answer["clean"]}
    return {"message": None, "line": None, "column": None, **found, **kept}


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
