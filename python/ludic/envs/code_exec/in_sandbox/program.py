"""What the child does: it becomes a program, compiles it, and runs it."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import json
import linecache
import os
import resource
import signal
import sys
import threading
import time
import traceback
import types
from _sitebuiltins import Quitter
from typing import NoReturn

from ludic.envs.code_exec.in_sandbox.leftovers import ALONE
from ludic.envs.code_exec.in_sandbox.process_control import JSON, PR_SET_DUMPABLE, PR_SET_PDEATHSIG, control
from ludic.envs.code_exec.in_sandbox.watch import MEGABYTE, MOST_PROCESSES

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
        resource.RLIMIT_CPU: int(timeout_s) + 2,  # should nobody look: the first process stops it sooner
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
    """The program if it is valid. What is found goes to VERDICT, as JSON, which is then closed."""
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
