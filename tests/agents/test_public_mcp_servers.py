"""Public servers of the Model Context Protocol, as they are: `make accept-mcp` installs them in an
environment of their own and runs these tests, without a network. And servers of the SDK, over both
transports."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from playing import ScriptedClient, play, verbatim
from tool_playing import call

pytest.importorskip("mcp")

from ludic.agents import ToolAgent
from ludic.agents.mcp_tools import McpServer
from ludic.context import FullDialog

PROGRAMS = os.environ.get("LUDIC_MCP_PROGRAMS")
public = pytest.mark.skipif(PROGRAMS is None, reason="`make accept-mcp` runs it in an environment with these servers")
pytestmark = pytest.mark.integration
OWN = '''
import sys
from mcp.server import MCPServer

server = MCPServer("shop")


@server.tool()
def stock(item: str) -> str:
    """How many of an item are in stock."""
    if item == "none":
        raise LookupError("no shelf")
    return {"long": "x" * 3_000_000}.get(item, "7")


if sys.argv[1:]:
    server.run(transport="streamable-http", port=int(sys.argv[1]), json_response=sys.argv[2] == "json")
else:
    server.run()
'''


def ask_all(source, *calls):
    """The names of the tools, and (text, failed) of each call."""
    with McpServer(source) as server:
        acting = ToolAgent(server.tools, client=ScriptedClient("a"), model="m", ctx=FullDialog(), parser=verbatim)
        results = play(acting._run_tool_calls([call(name, json.dumps(arguments)) for name, arguments in calls]))
        return list(acting.tool_map), [tuple(each) for each in results]


@public
def test_time():
    names, [(text, failed), (wrong, has_failed)] = ask_all(
        f"{PROGRAMS}/mcp-server-time --local-timezone Europe/Berlin",
        ("convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}),
        ("convert_time", {"source_timezone": "Nowhere", "time": "12:00", "target_timezone": "Asia/Tokyo"}),
    )
    assert names == ["get_current_time", "convert_time"]
    assert not failed
    assert json.loads(text)["time_difference"] == "+9.0h"
    assert has_failed
    assert "Nowhere" in wrong


@public
def test_git(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "new.txt").write_text("new")
    names, [(status, failed), (_, has_failed)] = ask_all(
        f"{PROGRAMS}/mcp-server-git", ("git_status", {"repo_path": str(tmp_path)}), ("git_status", {"repo_path": "/nowhere"})
    )
    assert "git_commit" in names
    assert (failed, has_failed) == (False, True)
    assert "new.txt" in status


@public
def test_sqlite(tmp_path):
    _, results = ask_all(
        f"{PROGRAMS}/mcp-server-sqlite --db-path {tmp_path}/shop.db",
        ("create_table", {"query": "CREATE TABLE stock (item TEXT, number INTEGER)"}),
        ("write_query", {"query": "INSERT INTO stock VALUES ('pears', 4)"}),
        ("read_query", {"query": "SELECT number FROM stock WHERE item = 'pears'"}),
    )
    assert [failed for _, failed in results] == [False] * 3
    assert "4" in results[-1][0]


@public
def test_calculator():
    _, [(text, failed)] = ask_all(f"{PROGRAMS}/mcp-server-calculator", ("calculate", {"expression": "7 * 6"}))
    assert (text, failed) == ("42", False), text


def check_own(source):
    names, [found, missing, wrong, (long, has_failed), again] = ask_all(
        source,
        ("stock", {"item": "pears"}),
        ("stock", {"item": "none"}),
        ("stock", {"item": 3}),
        ("stock", {"item": "long"}),
        ("stock", {"item": "pears"}),
    )
    assert names == ["stock"]
    assert found == again == ("7", False)
    assert missing[1]
    assert wrong[1]
    assert "valid string" in wrong[0]
    assert has_failed
    assert len(long) < 1000


def test_a_server_of_the_sdk(tmp_path):
    (tmp_path / "shop.py").write_text(OWN)
    check_own(f"env PYTHONPATH={os.environ.get('PYTHONPATH', '')} {sys.executable} {tmp_path / 'shop.py'}")


@pytest.mark.parametrize("kind", ["stream", "json"])
def test_a_server_of_the_sdk_over_http(tmp_path, kind):
    (tmp_path / "shop.py").write_text(OWN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Path(tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, tmp_path / "shop.py", str(port), kind], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        check_own(f"mcp:http://127.0.0.1:{port}/mcp")
    finally:
        process.kill()
        process.wait(10)
