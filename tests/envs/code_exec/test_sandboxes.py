"""Programs that try to get out, to stay, or to cheat, in every kind of real sandbox."""

import asyncio
import os
import socket
from pathlib import Path

import pytest
from hostile_programs import CHEATS, LEAVES, LEFT, PROGRAMS
from real_sandboxes import BACKENDS, pool_or_skip

from ludic.envs.code_exec.adapters.base import ExactMatchVerifier
from ludic.envs.code_exec.runners import StdinStdoutRunner
from ludic.envs.code_exec.types import RunStatus, TestCase

NOTES = {
    "its memory is watched": "it used more than",
    "its output is watched": "it printed more than",
    "its files are watched": "it made more than",
    "its processor time is watched": "it took more than",
    "its time is watched": "it took more than",
    "the first process watches the watcher": "stopped the process that watched it",
}
"""What a program's stderr says of a limit."""
pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("sandboxes")]


@pytest.fixture(scope="module", params=BACKENDS)
def sandbox(request):
    with pool_or_skip(request.param) as pool:
        yield asyncio.run(pool.checkout())


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What programs look for: a server, a socket without a file, a file, a variable."""
    path = tmp_path_factory.mktemp("host") / "secret"
    path.write_text("secret")
    path.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"ludic-hostile-test-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        passwords = next(line for line in Path("/etc/passwd").read_text().splitlines() if ":/" in line)
        yield {
            "HOST_PASSWORDS": passwords,
            "HOST_PORT": str(server.getsockname()[1]),
            "HOST_SOCKET": name,
            "HOST_FILE": str(path),
        }


def run(sandbox, code, **settings):
    """The result. A machine that is too busy says nothing about a program, which runs again."""
    while True:
        result = asyncio.run(sandbox.execute(code, **settings))
        if result.run_status is not RunStatus.SANDBOX_ERROR:
            return result


@pytest.mark.parametrize("hostile", PROGRAMS, ids=lambda one: one.name)
def test_nothing_gets_out(sandbox, host, hostile, monkeypatch):
    monkeypatch.setenv("LUDIC_TEST_SECRET", "secret")
    code = hostile.program
    for name, value in host.items():
        code = code.replace(name, value)
    ends = hostile.status is not RunStatus.TIMEOUT  # by another limit, or by itself
    limit_s = 60 if ends else 1
    result = run(sandbox, code, stdin="x" * 100_000, skip_compile=not ends, timeout_s=limit_s, memory_limit_mb=128)
    assert result.run_status in (hostile.status, hostile.or_status), (hostile.stopped_by, result)
    assert NOTES.get(hostile.stopped_by, "") in result.stderr, (hostile.stopped_by, result)
    if result.run_status is RunStatus.SUCCESS:
        assert result.stdout == "harmless\n"
    after = run(sandbox, "print(1)", timeout_s=30)
    assert (after.stdout, after.run_status) == ("1\n", RunStatus.SUCCESS)


@pytest.mark.parametrize("hostile", LEAVES, ids=lambda one: one.name)
def test_nothing_stays(sandbox, hostile):
    assert run(sandbox, hostile.program, timeout_s=20).stdout == "harmless\n"
    assert run(sandbox, LEFT, timeout_s=30).stdout == ""


@pytest.mark.parametrize("hostile", CHEATS, ids=lambda one: one.name)
def test_nothing_cheats(sandbox, hostile):
    tests = [TestCase("", "42", metadata={"timeout_s": 20})]
    code = hostile.program.removesuffix("\nprint('harmless')")
    batch = asyncio.run(StdinStdoutRunner().run_tests(sandbox, code, tests, verifier=ExactMatchVerifier()))
    assert (batch.sandbox_failed, batch.all_passed) == (False, False), batch
    honest = asyncio.run(StdinStdoutRunner().run_tests(sandbox, "print(42)", tests, verifier=ExactMatchVerifier()))
    assert honest.all_passed


def test_no_program_finds_what_another_one_printed(sandbox):
    """In its own memory, which begins as a copy of the process that started both."""
    thief = next(cheat for cheat in CHEATS if cheat.name.startswith("reads what"))
    secret = run(sandbox, "import os; print('printed-before-' + os.urandom(8).hex())", timeout_s=30).stdout
    assert secret.startswith("printed-before-")
    found = run(sandbox, thief.program, timeout_s=30).stdout
    assert secret.strip() not in found
