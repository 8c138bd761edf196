"""The process that runs programs, here without a sandbox around it."""

import asyncio
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from processes import wait_for_end

from ludic.envs.code_exec import process_sandbox
from ludic.envs.code_exec.adapters.base import ExactMatchVerifier
from ludic.envs.code_exec.backend import UnsafeProcess, UnsafeSubprocessPool
from ludic.envs.code_exec.bubblewrap import find_python
from ludic.envs.code_exec.process_sandbox import ProcessSandbox
from ludic.envs.code_exec.runners import StdinStdoutRunner
from ludic.envs.code_exec.types import CompileStatus, RunStatus, TestCase
from ludic.errors import GradingError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


@pytest.fixture(scope="module")
def sandbox():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool = UnsafeSubprocessPool(1)
    asyncio.run(pool.start())
    yield asyncio.run(pool.checkout())
    asyncio.run(pool.shutdown())


def run(sandbox, code, **settings):
    return asyncio.run(sandbox.execute(code, **settings))


def test_every_module_of_the_first_process_is_sent():
    files = Path(process_sandbox.__file__).with_name("in_sandbox").glob("*.py")
    assert sorted(process_sandbox.MODULES) == sorted(file.stem for file in files if file.stem != "__init__")


def test_using_it_is_warned_of():
    with pytest.warns(RuntimeWarning, match="runs programs without a sandbox"):
        UnsafeSubprocessPool(1)


@pytest.mark.parametrize(
    ("code", "stdin", "stdout", "exit_code"),
    [
        ("print(int(input()) * 2)", "21", "42\n", 0),
        ("import sys; print(sys.stdin.read().count('x'))", "x" * 300_000, "300000\n", 0),
        ("print(open('/dev/stdin').read())", "a", "a\n", 0),
        ("print('\\u00e9', end='')", "", "é", 0),
        ("import sys; sys.exit(3)", "", "", 3),
        ("import sys; sys.exit('message')", "", "", 1),
        ("raise SystemExit", "", "", 0),
        ("import os; print('lost'); os._exit(0)", "", "", 0),
        ("import atexit; atexit.register(print, 'last'); print('first')", "", "first\nlast\n", 0),
        ("import threading; threading.Timer(0.01, print, ['thread']).start()", "", "thread\n", 0),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nprint(A(1), __name__)", "", "A(x=1) __main__\n", 0),
        ("def f(n):\n    return n and f(n - 1)\nimport sys; sys.setrecursionlimit(10**5); print(f(9000))", "", "0\n", 0),
        ("import os; print(os.listdir('.'), sorted(os.environ))", "", "[] ['HOME', 'LANG', 'PATH']\n", 0),
        ("import sys; sys.stdin.close(); print('closed')", "x" * 300_000, "closed\n", 0),
        ("print(1); exit(0)", "", "1\n", 0),
        ("print(1)\nquit(2)", "", "1\n", 2),
        ("out = open(1, 'w'); out.write('left open')", "", "left open", 0),
        ("import io, sys; out = io.TextIOWrapper(sys.stdout.buffer); out.write('wrapped')", "", "wrapped", 0),
        ("import sys; print(1); sys.stdout.close()", "", "1\n", 0),
        ("import subprocess; print(subprocess.run(['echo', 'hi'], capture_output=True).stdout)", "", "b'hi\\n'\n", 0),
    ],
)  # fmt: skip
def test_a_program_runs_as_a_script_does(sandbox, code, stdin, stdout, exit_code):
    result = run(sandbox, code, stdin=stdin)
    assert (result.stdout, result.exit_code) == (stdout, exit_code), result.stderr
    assert result.run_status is (RunStatus.SUCCESS if exit_code == 0 else RunStatus.RUNTIME_ERROR)


def test_an_error_shows_the_lines_of_the_program_alone(sandbox):
    result = run(sandbox, "def f():\n    return 1 / 0\nf()")
    assert result.run_status is RunStatus.RUNTIME_ERROR
    assert result.exit_code == 1
    assert "return 1 / 0" in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "in_sandbox" not in result.stderr


@pytest.mark.parametrize(
    ("code", "status", "message", "line"),
    [
        ("x = 1", CompileStatus.SUCCESS, None, None),
        ("x = 1\nif", CompileStatus.SYNTAX_ERROR, "invalid syntax", 2),
        ("x = '\0'", CompileStatus.SYNTAX_ERROR, "null bytes", None),
        ("(" * 300 + ")" * 300, CompileStatus.SYNTAX_ERROR, "too many nested parentheses", 1),
        ("x = " + "-" * 200_000 + "1", CompileStatus.UNKNOWN_ERROR, "", None),
    ],
)
def test_compiling(sandbox, code, status, message, line):
    result = asyncio.run(sandbox.compile(code))
    assert result.status is status or (status is CompileStatus.UNKNOWN_ERROR and not result.success), result
    assert (message or "") in (result.error_message or "")
    assert line is None or result.error_line == line
    assert run(sandbox, "print(1)").stdout == "1\n"


@pytest.mark.parametrize(
    "code",
    ["while True: pass", "import time; time.sleep(100)", "import os\nos.fork()\nwhile True: pass"],
    ids=["processor time", "time", "processor time of all processes"],
)
def test_limits_of_time(sandbox, code):
    result = run(sandbox, code, timeout_s=0.1, skip_compile=True)
    assert result.run_status is RunStatus.TIMEOUT, result
    assert run(sandbox, "print(1)").stdout == "1\n"


WITHOUT_FIRST_THREADS = """
import ctypes, os, threading, time
def hold():
    time.sleep(0.1)
    x = bytearray(30 << 20)
    time.sleep(3)
for _ in range(4):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).pthread_exit(None)
time.sleep(1)"""
"""Processes of which /proc/N/status has no memory, since their first thread has ended."""


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("x = bytearray(10**9)", RunStatus.MEMORY_EXCEEDED),
        ("import mmap\nm = mmap.mmap(-1, 10**8)\nfor i in range(0, 10**8, 4096): m[i] = 1\nwhile True: pass", RunStatus.MEMORY_EXCEEDED),
        (WITHOUT_FIRST_THREADS, RunStatus.MEMORY_EXCEEDED),
        ("print('x' * 10**7)", RunStatus.RUNTIME_ERROR),
        ("import os\nwhile True: os.write(2, b'x' * 10**5)", RunStatus.RUNTIME_ERROR),
        ("f = open('big', 'wb')\nfor _ in range(100): f.write(b'x' * 10**6)", RunStatus.RUNTIME_ERROR),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", RunStatus.KILLED),
        ("import ctypes; ctypes.string_at(0)", RunStatus.RUNTIME_ERROR),
    ],
)  # fmt: skip
def test_other_limits(sandbox, code, status):
    result = run(sandbox, code, timeout_s=60, memory_limit_mb=64, skip_compile=True)
    assert result.run_status is status, result
    assert len(result.stdout) <= 1 << 20
    assert len(result.stderr) <= (1 << 20) + 1000
    assert run(sandbox, "print(1)").stdout == "1\n"


def test_nothing_of_a_program_is_left(sandbox, tmp_path):
    """Neither a process in a session of its own, nor a folder that is deep and locked."""
    note = tmp_path / "pid"
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({str(note)!r}, "w").write(str(os.getpid()))
        time.sleep(100)
    os._exit(0)
while not os.path.exists({str(note)!r}) or not open({str(note)!r}).read():
    time.sleep(0.001)
os.symlink("/", "root")
for _ in range(1500):
    os.mkdir("d"); os.chdir("d")
os.chmod(".", 0)
"""
    assert run(sandbox, code).run_status is RunStatus.SUCCESS
    assert wait_for_end(int(note.read_text()))
    assert run(sandbox, "import os; print(os.listdir('.'))").stdout == "[]\n"
    assert os.path.isdir("/usr")  # the link was deleted, not what it led to


def test_programs_do_not_change_the_interpreter_for_others(sandbox):
    run(sandbox, "import builtins, sys, os; builtins.print = None; sys.stdout = None; os._exit(0)")
    run(sandbox, "import math; math.sqrt = lambda x: 7")
    assert run(sandbox, "import math; print(math.sqrt(4))").stdout == "2.0\n"


def test_a_call_that_is_cancelled_ends_the_program_and_frees_the_sandbox(sandbox, tmp_path):
    note = tmp_path / "pid"

    async def cancel():
        code = f"""
import os, time
open({f"{note}.new"!r}, "w").write(str(os.getpid()))
os.replace({f"{note}.new"!r}, {str(note)!r})
time.sleep(1000)"""
        task = asyncio.create_task(sandbox.execute(code, timeout_s=1000))
        async with asyncio.timeout(60):
            while not note.exists():
                await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sandbox.reset()
        return await sandbox.execute("print(1)")

    assert asyncio.run(cancel()).stdout == "1\n"
    assert wait_for_end(int(note.read_text()))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_program_that_ends_its_handler_has_failed(sandbox, name):
    result = run(sandbox, f"import os, signal; print(1, flush=True); os.kill(os.getppid(), signal.{name})", timeout_s=0.1)
    assert result.run_status is RunStatus.KILLED
    assert "stopped the process that watched it" in result.stderr
    assert run(sandbox, "print(1)").stdout == "1\n"


def test_a_runner_that_dies_fails_one_call(sandbox):
    """Without a sandbox, a program can do that."""
    grandparent = "int(open(f'/proc/{os.getppid()}/stat').read().split()[3])"
    with pytest.raises(GradingError, match=r"the program runner failed \(exit status"):
        run(sandbox, f"import os, signal; os.kill({grandparent}, signal.SIGKILL)")
    assert run(sandbox, "print(1)").stdout == "1\n"


def test_what_is_expected_does_not_enter_the_sandbox(sandbox):
    """The program looks for it in the memory of its own process."""
    search = """
import gc
found = [str(one)[:80] for one in gc.get_objects() if isinstance(one, (dict, list, tuple)) and "TERCES"[::-1] in str(one)]
print(found or "nothing")
"""
    tests = [TestCase("1", "SECRET"), TestCase("2", "nothing")]
    batch = asyncio.run(StdinStdoutRunner().run_tests(sandbox, search, tests, verifier=ExactMatchVerifier()))
    assert [result.actual for result in batch.results] == ["nothing\n", "nothing\n"]


def test_compiling_has_a_limit_of_memory():
    async def compile_large():
        sandbox = await ProcessSandbox.started(UnsafeProcess(find_python(None)), memory_limit_mb=16)
        try:
            return await sandbox.compile(f"x = [{'f(1),' * 300_000}]", timeout_s=60), await sandbox.compile("x = 1")
        finally:
            await sandbox.stop()

    large, small = asyncio.run(compile_large())
    assert large.status is CompileStatus.UNKNOWN_ERROR
    assert "memory" in large.error_message.lower()
    assert small.success


def test_nothing_is_left_when_the_process_that_runs_programs_is_killed(tmp_path):
    """Neither its folder, nor a program that runs."""
    code = f"""
import asyncio
from ludic.envs.code_exec.backend import UnsafeSubprocessPool
async def main():
    pool = UnsafeSubprocessPool(1)
    await pool.start()
    program = "import os, time; open({str(tmp_path / "pid.new")!r}, 'w').write(f'{{os.getpid()}} {{os.getcwd()}}')"
    program += "; os.replace({str(tmp_path / "pid.new")!r}, {str(tmp_path / "pid")!r}); open('file', 'w'); time.sleep(1000)"
    await (await pool.checkout()).execute(program, timeout_s=1000)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", code]) as process:
        try:
            while not (tmp_path / "pid").exists():
                assert process.poll() is None
                time.sleep(0.005)
        finally:
            process.kill()
    pid, folder = (tmp_path / "pid").read_text().split()
    assert wait_for_end(int(pid))
    deadline = time.monotonic() + 60
    while os.path.exists(folder):
        assert time.monotonic() < deadline
        time.sleep(0.01)
