"""The first process of a sandbox (crates/ludic-relay), outside of one: a command, its variables and
limits, and connections to a socket file."""

import asyncio
import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from ludic import _core
from ludic.envs.workspaces.workspace import tell

DEADLINE_S = 60
SLEEP = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", "echo started; exec sleep 600"]
"""It ends with the relay also outside of a sandbox."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")


@pytest.fixture(scope="module")
def place():
    """A folder with the program, whose path is short, as that of a socket has to be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder, "relay")
        path.write_bytes(_core.relay_program())
        path.chmod(0o755)
        yield Path(folder)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(place, *command, told=None, port=None):
    """The relay with a command; its input stays open."""
    words = [shutil.which("prlimit"), "--nofile=32", place / "relay", place / "socket", str(port or free_port()), *command]
    pipe = subprocess.PIPE
    relay = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, env={"PATH": "/nowhere", "KEPT": "kept"})
    relay.stdin.write(tell({"PATH": os.environ["PATH"]}) if told is None else told)
    relay.stdin.flush()
    return relay


def run(place, *command, **given):
    """Status, output and errors of a command."""
    with start(place, *command, **given) as relay:
        try:
            return relay.wait(DEADLINE_S), relay.stdout.read().decode(), relay.stderr.read().decode()
        finally:
            relay.kill()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["true"], (0, "", "")),
        (["sh", "-c", "echo out; echo err >&2; exit 7"], (7, "out\n", "err\n")),
        (["sh", "-c", "kill -9 $$"], (137, "", "")),
        (["sh", "-c", "kill -TERM $$"], (143, "", "")),
        (["cat"], (0, "", "")),  # its input is empty
        (["sh", "-c", "yes | head -n 1"], (0, "y\n", "")),  # SIGPIPE ends yes, without a message
        (["sh", "-c", "echo $KEPT; ls /proc/self/fd | wc -l"], (0, "kept\n4\n", "")),  # 0, 1, 2, and the folder
    ],
)
def test_it_ends_as_the_command_did(place, command, expected):
    assert run(place, *command) == expected


@pytest.mark.parametrize(("program", "reason"), [("no-such-program", "No such file"), ("/etc", "Permission denied")])
def test_a_command_that_cannot_be_started_is_named(place, program, reason):
    code, output, errors = run(place, program)
    assert (code, output) == (127, "")
    assert errors.startswith(f"{program} cannot be started: {reason}")


@pytest.mark.parametrize(
    "told", [b"\n", b"\n5:A=1", b"\nx:", b"\n-1:", b"\n99999999999999999999:", b"unknown=1\n0:", b"nproc=x\n0:"]
)
def test_an_input_that_is_wrong_starts_no_command(place, told):
    with start(place, "echo", "started", told=told) as relay:
        relay.stdin.close()
        assert relay.wait(DEADLINE_S) == 1
        assert relay.stdout.read() == b""


characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
names = st.text(characters, min_size=1).filter(lambda name: "=" not in name and name not in ("PATH", "KEPT"))


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(names, st.text(characters)))
@example({"A": "", "B": "1\n2:C=3\n", "C": "=="})
def test_variables_arrive_as_they_are(place, variables):
    variables = {**variables, "PATH": os.environ["PATH"]}
    code, output, errors = run(place, "env", "-0", told=tell(variables))
    assert (code, errors) == (0, "")
    assert set(output.split("\0")) == {"KEPT=kept", "", *(f"{name}={value}" for name, value in variables.items())}


def test_a_variable_that_no_process_can_have_starts_no_command(place):
    code, _, errors = run(place, "env", told=tell({"PATH": os.environ["PATH"], "A": "1\0B=2"}))
    assert code == 127
    assert "env cannot be started" in errors


def test_limits_hold_for_the_command(place):
    told = tell({"PATH": os.environ["PATH"]}, "nproc=500 fsize=5120")
    _, output, _ = run(place, "cat", "/proc/self/limits", told=told)
    limits = [line.split()[-3:-1] for line in output.splitlines() if line.startswith(("Max processes", "Max file size"))]
    assert limits == [["5120", "5120"], ["500", "500"]]


@pytest.mark.parametrize("last", [b"", b"more"])
def test_it_ends_when_its_input_ends_or_goes_on(place, last):
    with start(place, *SLEEP) as relay:
        assert relay.stdout.readline() == b"started\n"
        relay.stdin.write(last)
        relay.stdin.close()
        assert relay.wait(DEADLINE_S) == 1


def test_without_a_command_it_waits_for_sigterm(place):
    with subprocess.Popen([place / "relay"], stdin=subprocess.DEVNULL) as relay:
        deadline = time.monotonic() + DEADLINE_S
        while not caught_signals(relay.pid) & 1 << signal.SIGTERM - 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        relay.terminate()
        assert relay.wait(DEADLINE_S) == 0


def caught_signals(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("SigCgt:")[1].split()[0], 16)


@asynccontextmanager
async def served(place, answer):
    """Connects to a relay before a socket file, whose connections `answer` has."""
    server = await asyncio.start_unix_server(answer, place / "socket")
    port = free_port()
    relay = await asyncio.to_thread(start, place, *SLEEP, port=port)
    try:
        await asyncio.to_thread(relay.stdout.readline)  # it listens before the command starts
        async with asyncio.timeout(DEADLINE_S):
            yield lambda: asyncio.open_connection("127.0.0.1", port)
    finally:
        relay.communicate()
        server.close()
        (place / "socket").unlink()


async def test_bodies_of_many_connections_are_whole_both_ways(place):
    """The end of the one direction leaves the other open."""

    async def answer(reader, writer):
        body = await reader.read()
        writer.write(hashlib.sha256(body).digest() + body[::-1])
        await writer.drain()
        writer.close()

    async def call(connect, number):
        body = random.Random(number).randbytes(number * 1_000_000)
        reader, writer = await connect()
        writer.write(body)
        await writer.drain()
        writer.write_eof()
        await asyncio.sleep(0.2)  # now both sides have to wait for this one
        got = await reader.read()
        writer.close()
        return got == hashlib.sha256(body).digest() + body[::-1]

    async with served(place, answer) as connect:
        assert all(await asyncio.gather(*(call(connect, number) for number in range(8))))


async def test_each_side_learns_that_the_other_has_gone(place):
    gone = asyncio.Queue()

    async def answer(reader, writer):
        if await reader.read(1) == b"w":  # else the server goes first
            gone.put_nowait(await reader.read())
        writer.close()

    async with served(place, answer) as connect:
        for _ in range(3):
            reader, writer = await connect()
            writer.write(b"x")
            assert await reader.read() == b""
            writer.close()
            _, writer = await connect()
            writer.write(b"w")
            await writer.drain()
            writer.close()
            assert await gone.get() == b""


async def test_connections_outlive_a_server_that_is_not_there_and_a_client_that_resets(place):
    async def answer(reader, writer):
        writer.write(await reader.read(1) * 10_000_000)
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async with served(place, answer) as connect:
        (place / "socket").rename(place / "moved")
        reader, writer = await connect()
        assert await reader.read() == b""
        writer.close()
        (place / "moved").rename(place / "socket")
        for _ in range(3):
            reader, writer = await connect()
            writer.write(b"a")
            await reader.readexactly(10)
            writer.transport.abort()
        reader, writer = await connect()
        writer.write(b"b")
        assert await reader.read() == b"b" * 10_000_000
        writer.close()


async def test_more_connections_than_files_are_answered_one_after_another(place):
    """The relay may open 32 files: 14 or fewer connections."""

    async def answer(reader, writer):
        writer.write(await reader.read(1))
        writer.close()

    async with served(place, answer) as connect:
        idle = [await connect() for _ in range(40)]
        for _, writer in idle:
            writer.write(b"a")
        for reader, writer in idle:
            with suppress(ConnectionError):
                assert await reader.read() in (b"a", b"")
            writer.close()
        reader, writer = await connect()
        writer.write(b"b")
        assert await reader.read() == b"b"
        writer.close()
