"""Running tools. Whatever happens, the model gets a result and the episode continues."""

import asyncio
import contextvars
import functools
import re
import sys
import threading

import pytest
from playing import FOR_RL, ScriptedClient, play, verbatim
from tool_playing import call

from ludic.agents import ToolAgent
from ludic.agents.tool_calls import EpisodeLost
from ludic.context import FullDialog
from ludic.errors import ConfigError, RolloutError
from ludic.inference import InferenceSpec, ReturnSpec, ToolRequest

place = contextvars.ContextVar("place")


def add(a: int, b: int) -> int:
    return a + b


async def slowly(text: str) -> str:
    await asyncio.sleep(0)
    return text.upper()


def agent(*tools, **settings):
    return ToolAgent(tools, client=ScriptedClient("a"), model="m", ctx=FullDialog(), parser=verbatim, **settings)


async def run_calls(acting, *calls):
    """The texts of the results."""
    returned = await acting._run_tool_calls(calls)
    assert acting.num_failed == sum(each.failed for each in returned)
    return [each.text for each in returned]


def results(acting, *calls):
    texts = play(run_calls(acting, *calls))
    assert [m["content"] for m in acting._ctx.messages] == texts
    return texts


def test_results_are_added_to_the_context_in_order():
    acting = agent(add, slowly)
    calls = [call("add", '{"a": 1, "b": 2}', 0), call("slowly", '{"text": "x"}', 1)]
    assert results(acting, *calls) == ["3", "X"]
    assert acting._ctx.messages == [
        {"role": "tool", "tool_call_id": "id0", "name": "add", "content": "3"},
        {"role": "tool", "tool_call_id": "id1", "name": "slowly", "content": "X"},
    ]


def stops():
    return next(iter(()))


def leaves():
    sys.exit(3)


async def times_out():
    raise TimeoutError("the server did not answer")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (call("nothing"), "Error: Tool nothing not found."),
        (call("add", "{not json"), "Error: the arguments are not JSON: Expecting property name"),
        (call("add", "[1, 2]"), "Error: the arguments must be a JSON object, got [1, 2]"),
        (call("add", "[" * 100_000), "Error: maximum recursion depth exceeded"),
        (call("add", '{"a": 1}'), "Error: the argument b is missing"),
        (call("add", '{"a": 1, "b": 2, "c": 3}'), "Error: there is no argument c; the arguments are a, b"),
        (call("add", '{"a": "three", "b": 2}'), "Error: argument a must be a valid integer, got 'three'"),
        ({**call(""), "error": "no name", "text": "<x"}, "Error: the call cannot be read: no name. Write it again."),
        (call("stops"), "Error executing tool stops"),
        (call("leaves"), "Error executing tool leaves: SystemExit: 3"),
        (call("times_out"), "Error executing tool times_out: TimeoutError"),
        ({"function": {"name": "add"}}, "Error: the argument a is missing"),
        ({}, "Error: Tool  not found."),
    ],
)
def test_a_failed_call_is_reported_to_the_model_and_the_next_one_runs(asked, told):
    first, second = results(agent(add, stops, leaves, times_out), asked, call("add", '{"a": 1, "b": 1}'))
    assert told in first
    assert second == "2"


def test_empty_arguments_can_be_written_in_several_ways():
    def now():
        return "noon"

    ways = [call("now", ""), call("now", "{}"), call("now", None), {"id": "x", "function": {"name": "now"}}]
    assert results(agent(now), *ways) == ["noon"] * 4


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_a_hanging_tool_is_abandoned_at_its_deadline(kind):
    release = threading.Event()

    async def hangs():
        await asyncio.Event().wait()

    def hangs_too():
        release.wait(30)

    tool = hangs if kind == "async" else hangs_too
    (text,) = results(agent(tool, tool_timeout_s=0.02), call(tool.__name__))
    release.set()
    assert re.search(rf"{tool.__name__}: ToolTimeoutError: .*0\.02 s$", text)


def test_hanging_tools_block_neither_other_tools_nor_the_end_of_the_program():
    """More hanging tools than the event loop's thread pool has threads; `asyncio.run` would wait
    for those."""
    release = threading.Event()

    def hangs():
        release.wait(30)

    def quick():
        return threading.current_thread().daemon

    async def run():
        many = [run_calls(agent(hangs, tool_timeout_s=0.05), call("hangs")) for _ in range(64)]
        *lost, told = await asyncio.gather(*many, run_calls(agent(quick), call("quick")))
        await asyncio.to_thread(int)  # the thread pool is free
        return lost, told

    lost, told = play(run())
    release.set()
    assert told == ["True"]
    assert all("no result within" in text for (text,) in lost)


def test_a_synchronous_tool_does_not_block_the_event_loop():
    """The tool waits for something that only the event loop can do."""

    async def run():
        loop, opened = asyncio.get_running_loop(), threading.Event()

        def waits():
            loop.call_soon_threadsafe(opened.set)
            return opened.wait(30)

        return await run_calls(agent(waits), call("waits"))

    assert play(run()) == ["True"]


def test_a_synchronous_tool_sees_the_context_variables_of_its_episode():
    def where():
        return place.get()

    async def run():
        place.set("here")
        return await run_calls(agent(where), call("where"))

    assert play(run()) == ["here"]


def test_a_synchronous_function_may_return_a_coroutine():
    def later():
        return slowly("x")

    assert results(agent(later), call("later")) == ["X"]


def test_a_wrapped_coroutine_function_and_an_object_with_one_are_awaited():
    @functools.wraps(slowly)
    def wrapped(text):
        return slowly(text)

    class Slow:
        __name__ = "object"

        async def __call__(self, text: str):
            return await slowly(text)

    acting = agent(wrapped, Slow())
    assert results(acting, call("slowly", '{"text": "x"}'), call("object", '{"text": "y"}')) == ["X", "Y"]


def test_a_tool_may_end_its_episode():
    def look():
        raise EpisodeLost("the store is gone")

    with pytest.raises(RolloutError, match="the store is gone"):
        results(agent(look), call("look"))


def test_cancelling_an_episode_cancels_its_tool():
    cancelled = []

    async def hangs():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run():
        async with asyncio.timeout(0.02):
            await agent(hangs)._run_tool_calls([call("hangs")])

    with pytest.raises(TimeoutError):
        play(run())
    assert cancelled == [True]


def test_tools_and_token_ids_are_in_the_request():
    acting = agent(add, slowly)
    assert list(acting.tool_map) == ["add", "slowly"]
    assert acting._tool_request() == ToolRequest(tools=acting.tool_schemas, tool_choice="auto", keep_malformed=True)
    assert not agent(add, malformed_calls="answer")._tool_request().keep_malformed
    spec = InferenceSpec(sampling=FOR_RL.sampling, return_=ReturnSpec(return_chosen_logprobs=True, top_logprobs_k=3))
    with_tools = acting._with_tools(spec)
    assert with_tools.return_ == ReturnSpec(return_token_ids=True, return_chosen_logprobs=True, top_logprobs_k=3)
    assert with_tools.sampling == FOR_RL.sampling
    assert acting._with_tools(None).return_.return_token_ids


def test_tool_calls_are_read_from_the_servers_message():
    extract = agent(add)._extract_openai_message
    calls = [call("add")]
    assert extract({"raw_response": {"choices": [{"message": {"content": None, "tool_calls": calls}}]}}) == (None, calls)
    assert extract({"raw_response": {"choices": [{"message": {"content": "hi"}}]}}) == ("hi", [])
    assert extract({"raw_response": {"choices": []}, "completion": "hi"}) == ("hi", [])
    assert extract({"completion": "hi"}) == ("hi", [])
    assert extract({"raw_response": {"choices": [{"message": None}]}, "completion": "hi"}) == ("hi", [])


def test_invalid_settings_are_refused():
    with pytest.raises(ConfigError, match="tool_timeout_s"):
        agent(add, tool_timeout_s=0.0)
    with pytest.raises(ConfigError, match="share a name"):
        agent(add, add)
    with pytest.raises(ConfigError, match="malformed_calls"):
        agent(add, malformed_calls="retry")


def test_a_thousand_calls_leak_no_thread_and_no_task():
    async def run():
        acting = agent(add, slowly)
        calls = [call("add", '{"a": 1, "b": 2}'), call("slowly", '{"text": "x"}')] * 500
        texts = await run_calls(acting, *calls)
        return texts, asyncio.all_tasks() - {asyncio.current_task()}

    texts, tasks = play(run())
    assert texts == ["3", "X"] * 500
    assert tasks == set()
    left = [thread for thread in threading.enumerate() if thread.name == "tool"]
    for thread in left:
        thread.join(30)
    assert not any(thread.is_alive() for thread in left)
