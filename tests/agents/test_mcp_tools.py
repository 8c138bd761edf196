"""Servers of the Model Context Protocol as tools. Whatever a server does, a call returns within its
deadline, the model gets a text, and the next call works."""

import os
import sys
import time
from pathlib import Path

import pytest
from mcp_server import SCHEMAS
from playing import FOR_RL, Counting, ScriptedClient, play, verbatim
from tool_playing import CallingClient, call

pytest.importorskip("mcp")

from ludic.agents import ReActAgent, ToolAgent, mcp_tools
from ludic.agents.mcp_tools import McpServer, check_source
from ludic.agents.tool_agent import ToolUse, check_tools, find_tools
from ludic.agents.tool_calls import EpisodeLost
from ludic.context import FullDialog
from ludic.errors import ConfigError
from ludic.inference.client import new_episode
from ludic.interaction import SingleAgentProtocol

COMMAND = f"mcp:{sys.executable} {Path(__file__).parents[1] / 'support' / 'mcp_server.py'}"


@pytest.fixture(scope="module")
def server():
    with McpServer(COMMAND) as made:
        yield made


def agent(server, **settings):
    return ToolAgent(server.tools, client=ScriptedClient("a"), model="m", ctx=FullDialog(), parser=verbatim, **settings)


def ask(acting, name, arguments="{}"):
    """(text of the result, whether it is an error)."""
    return tuple(play(acting._run_tool_calls([call(name, arguments)]))[0])


def pid(acting):
    return int(ask(acting, "pid")[0])


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(is_true, seconds=10):
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_true()


def test_a_model_is_told_the_servers_own_schemas(server):
    acting = agent(server)
    assert list(acting.tool_map) == list(SCHEMAS)  # of both pages
    told = {"name": "stock", "description": "It stock.", "parameters": SCHEMAS["stock"]}
    assert acting.tool_schemas[0] == {"type": "function", "function": told}
    use = ToolUse(server.tools)
    assert use.schemas == acting.tool_schemas


@pytest.mark.parametrize(
    ("name", "arguments", "told", "failed"),
    [
        ("stock", '{"item": "a"}', "7", False),
        ("echo", '{"text": "a&b"}', "a\nb", False),
        ("echo", '{"text": "\\u0000\\u001b[2J\\u202e<|im_end|>"}', "\0\x1b[2J\u202e<|im_end|>", False),
        ("picture", "{}", "see\n[image]", False),
        ("prints", "{}", "", False),
        ("fails", "{}", "Error: no shelf", True),
        ("refuses", "{}", "Error: MCPError: no tools/call", True),
    ],
)
def test_a_result_is_the_texts_and_an_error_counts_as_failed(server, name, arguments, told, failed):
    acting = agent(server)
    assert ask(acting, name, arguments) == (told, failed)
    assert acting.num_failed == failed


@pytest.mark.parametrize("name", ["dies", "floods"])
def test_a_server_that_ends_or_writes_without_end_is_started_again(server, name):
    acting = agent(server)
    before = pid(acting)
    text, failed = ask(acting, name)
    assert failed
    assert text.startswith(f"Error: the connection to the server of {name} has ended")
    assert pid(acting) != before
    wait_until(lambda: not is_alive(before))


def test_a_server_that_hangs_is_started_again_and_one_that_only_leaves_a_call_is_not(server, monkeypatch):
    monkeypatch.setattr(mcp_tools, "ALIVE_S", 0.3)
    acting = agent(server, tool_timeout_s=1.0)
    before = pid(agent(server))
    assert "no result within 1.0 s" in ask(acting, "waits")[0]
    time.sleep(0.6)
    assert pid(agent(server)) == before
    assert "no result within 1.0 s" in ask(acting, "hangs")[0]
    wait_until(lambda: not is_alive(before))
    assert pid(agent(server)) != before


def test_a_result_of_the_wrong_type_is_a_failed_call(server):
    text, failed = ask(agent(server), "lies")
    assert failed
    assert text.startswith("Error: ValidationError")


def test_a_server_that_ends_can_lose_its_episode(tmp_path):
    with McpServer(COMMAND, on_exit="lose") as server, pytest.raises(EpisodeLost, match="has ended"):
        ask(agent(server), "dies")


def test_each_episode_can_have_a_server_of_its_own_which_ends_with_it():
    async def twice():
        with new_episode():
            texts = [(await agent(server)._run_tool_calls([call("pid")]))[0].text for _ in range(2)]
        return list(map(int, texts))

    with McpServer(COMMAND, per_episode=True) as server:
        first, again = play(twice())
        assert first == again
        wait_until(lambda: not is_alive(first))
        other, _ = play(twice())
        assert other != first


def test_all_processes_end_with_the_server():
    with McpServer(COMMAND) as server:
        process = pid(agent(server))
    assert not is_alive(process)
    assert pid(agent(server)) != process  # the next use starts it again
    server.close()


def test_an_agent_that_reasons_calls_a_server():
    with McpServer(COMMAND) as server:
        client = CallingClient(("let me see", [call("stock", '{"item": "a"}')]), "7")
        acting = ReActAgent(server.tools, client=client, model="m", ctx=FullDialog(), parser=verbatim)
        [rollout] = play(SingleAgentProtocol(acting).run(env=Counting(), max_steps=1, inference=FOR_RL))
    assert [step.action for step in rollout.steps] == ["let me see", "7"]
    assert rollout.steps[0].next_obs == "7"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (f"{COMMAND} silent", r"not ready after 1 s .*start_timeout_s.*wrote: begins"),
        (f"{COMMAND} broken", "cannot be listed.*no shelf in the shop"),
        ("mcp:no-such-program --fast", "whose program is found"),
        ("mcp:", "whose program is found"),
        ('mcp:python "', "cannot be read: No closing quotation"),
        ("mcp:http://127.0.0.1:1/mcp", "cannot be listed"),
    ],
)
def test_a_server_that_cannot_be_started_is_an_error_before_the_run(source, said):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        find_tools(source, start_timeout_s=1.0 if "silent" in source else 30.0)
    assert time.monotonic() - started < 20


def test_a_check_of_names_starts_no_server(tmp_path):
    check_tools([f"{COMMAND} {tmp_path}"])
    assert list(tmp_path.iterdir()) == []
    check_source("http://127.0.0.1:1/mcp")


@pytest.mark.parametrize("name", ["two words", "", "a" * 65, "look\x1b[2J"])
def test_a_name_that_no_model_can_call_is_refused(name):
    tool = type("Listed", (), {"name": name, "description": "", "input_schema": {}})()
    with pytest.raises(ConfigError, match="models can call names of up to 64"):
        mcp_tools.McpTool(McpServer(COMMAND), tool)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"mcp\.on_exit"):
        McpServer(COMMAND, on_exit="ignore")
    with pytest.raises(ConfigError, match=r"mcp\.start_timeout_s"):
        McpServer(COMMAND, start_timeout_s=0)
