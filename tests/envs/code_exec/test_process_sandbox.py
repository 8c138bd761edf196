"""What a program costs: requests, and processes that are forked for it."""

import asyncio
import os
import struct
import sys
import warnings

import pytest
from hypothesis import given, settings, strategies as st

from ludic.envs.code_exec.adapters.base import ExactMatchVerifier
from ludic.envs.code_exec.backend import UnsafeSubprocessPool
from ludic.envs.code_exec.in_sandbox.leftovers import MEMORY_FIELDS
from ludic.envs.code_exec.in_sandbox.run_program import last_number
from ludic.envs.code_exec.runners import StdinStdoutRunner
from ludic.envs.code_exec.types import BatchExecutionSpec, CompileResult, CompileStatus, ExecutionResult, RunStatus, TestCase
from ludic.errors import GradingError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
WHO = "import os; print(os.getpid(), os.getppid())"


class Requests:
    """The operations that the sandbox's process was asked for."""

    def __init__(self, sandbox, monkeypatch):
        self.made, ask = [], sandbox._process.ask

        def count(request, *, timeout_s):
            self.made.append(request["op"])
            return ask(request, timeout_s=timeout_s)

        monkeypatch.setattr(sandbox._process, "ask", count)


@pytest.fixture(scope="module")
def sandbox():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool = UnsafeSubprocessPool(1)
    asyncio.run(pool.start())
    yield asyncio.run(pool.checkout())
    asyncio.run(pool.shutdown())


def run_batch(sandbox, code, count, *, stop_after=None):
    """(the compile result, the stdout of each test that was asked for)."""

    async def play():
        compiled, printed = None, []
        answers = sandbox.execute_batch(
            BatchExecutionSpec(code, [TestCase("", "", id=str(i)) for i in range(count)], timeout_s=60)
        )
        async for answer in answers:
            if isinstance(answer, CompileResult):
                compiled = answer
            elif isinstance(answer, ExecutionResult):
                printed.append(answer.stdout)
            if len(printed) == stop_after:
                break
        await answers.aclose()
        return compiled, printed

    return asyncio.run(play())


@pytest.mark.parametrize("tests", [1, 2, 10])
def test_a_program_costs_a_request_a_test_and_one_more_process(sandbox, monkeypatch, tests):
    """Its tests have one handler, which has compiled nothing: the first test's process has."""
    requests = Requests(sandbox, monkeypatch)
    compiled, printed = run_batch(sandbox, WHO, tests)
    asyncio.run(sandbox.reset())
    assert compiled.success
    assert requests.made == ["run"] * tests  # compiling and cleaning ask for nothing more
    programs, handlers = zip(*(line.split() for line in printed), strict=True)
    assert (len(set(programs)), len(set(handlers))) == (tests, 1)


def test_a_program_that_fails_early_costs_what_it_ran(sandbox, monkeypatch):
    requests = Requests(sandbox, monkeypatch)
    cases = [TestCase("", "right")] * 10
    batch = asyncio.run(
        StdinStdoutRunner().run_tests(sandbox, "print('wrong')", cases, verifier=ExactMatchVerifier(), stop_on_first_failure=True)
    )
    asyncio.run(sandbox.reset())
    assert batch.passed_count == 0
    assert requests.made == ["run", "clean"]


def test_a_program_that_is_not_valid_costs_one_request(sandbox, monkeypatch):
    requests = Requests(sandbox, monkeypatch)
    compiled, printed = run_batch(sandbox, "x = ", 10)
    assert (compiled.status, printed) == (CompileStatus.SYNTAX_ERROR, [])
    assert requests.made == ["run"]


def test_another_program_has_a_process_of_its_own_at_any_time(sandbox, monkeypatch):
    """A handler's memory is what its program's processes are copies of."""
    _, (first,) = run_batch(sandbox, WHO, 3, stop_after=1)
    _, (again,) = run_batch(sandbox, WHO, 3, stop_after=1)
    requests = Requests(sandbox, monkeypatch)
    other = asyncio.run(sandbox.execute(f"{WHO} # other")).stdout
    assert requests.made == ["run", "run"]  # the second because the first was another program's
    handlers = [line.split()[1] for line in (first, again, other)]
    assert handlers[0] == handlers[1] != handlers[2]


def test_a_reset_asks_only_where_something_may_be_left(sandbox, monkeypatch):
    asyncio.run(sandbox.execute("print(1)"))
    requests = Requests(sandbox, monkeypatch)
    asyncio.run(sandbox.reset())
    assert requests.made == []
    sandbox._process.kill()
    with pytest.raises(GradingError, match=r"runner failed \(exit status"):
        asyncio.run(_reset_when_dead(sandbox))
    asyncio.run(sandbox.reset())  # another process
    assert asyncio.run(sandbox.execute("print(2)")).stdout == "2\n"


async def _reset_when_dead(sandbox):
    """Its end may be seen a moment later."""
    while True:
        await sandbox.reset()
        await asyncio.sleep(0.01)


def test_a_verdict_cannot_be_written_by_the_program(sandbox):
    """What says whether it is valid is closed before it runs."""
    code = 'import os\nfor end in range(3, 64):\n    try: print(os.write(end, b\'{"status": "syntax_error"}\'))\n    except OSError: pass'
    result = asyncio.run(sandbox.execute(code))
    assert (result.compiled, result.run_status, result.stdout) == (True, RunStatus.SUCCESS, "")


def test_a_machine_too_busy_to_compile_gives_no_verdict(sandbox, monkeypatch):
    reply = {"clean": True, "status": "sandbox_error", "stderr": "busy", "compiled": {"status": "sandbox_error"}}
    monkeypatch.setattr(sandbox._process, "ask", lambda *_, **__: dict(reply))
    with pytest.raises(GradingError, match="not compiled in time: busy"):
        asyncio.run(sandbox.execute("print(1)"))
    cases = [TestCase("", "1")] * 2
    batch = asyncio.run(StdinStdoutRunner().run_tests(sandbox, "print(1)", cases, verifier=ExactMatchVerifier()))
    assert batch.sandbox_failed


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False)))
def test_the_last_number_of_a_pipe(numbers):
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    try:
        os.write(write_end, b"".join(struct.pack("d", number) for number in numbers))
        assert last_number(read_end) == (numbers[-1] if numbers else None)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_memory_that_was_swapped_out_is_counted():
    status = (
        b"Name:\tRssAnon:\nRssAnon:\t  10 kB\nRssFile:\t 500 kB\nRssShmem:\t 20 kB\nVmSwap:\t 300 kB\nHugetlbPages:\t 4000 kB\n"
    )
    assert sum(map(int, MEMORY_FIELDS.findall(status))) == 4330
