"""Agents with tools: their base class, the agent that reasons and calls tools until it answers, and
the tools of a run by their names in a recipe, with their limits.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludic.agents.base_agent import Agent, IntermediateCall
from ludic.agents.mcp_tools import PREFIX, McpServer, McpTool, check_source
from ludic.agents.tool_calls import EpisodeLost, ToolCall, ToolError, ToolResult, call_arguments, call_name
from ludic.agents.tool_schema import check_names, read_arguments, tool_schema
from ludic.errors import ConfigError, ConfigTypeError, LudicError, check_value
from ludic.event_loop import await_if_needed, run_in_daemon_thread
from ludic.inference.request import InferenceSpec, ToolRequest, call_seed
from ludic.parsers import ParseResult
from ludic.types import Message, TokenTrace
from ludic.user_objects import GivenNames, import_named

logger = logging.getLogger(__name__)

MALFORMED = ("error", "answer")


class ToolAgent(Agent):
    """Describes its tools to the model and runs them. A subclass decides when: see `ReActAgent`.

    A tool is a named function or coroutine function; the model sees its parameters and docstring.
    Plain functions run in a thread, one at a time for each agent; tools that several episodes share
    must be thread-safe. If a tool fails, is unknown, gets arguments of other types than its hints,
    or takes longer than `tool_timeout_s`, the model gets an error message as its result, the call
    counts as failed, and the episode continues. A tool that raises `EpisodeLost` ends it.

    `malformed_calls`: what a text is that the client's model wrote between the tags of a call, and
    that is no call, such as broken JSON. `error`: a failed call. `answer`: a text without calls.
    """

    name = "tool_agent"

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        *,
        tool_timeout_s: float | None = 30.0,
        malformed_calls: str = "error",
        **agent_kwargs: Any,
    ) -> None:
        super().__init__(**agent_kwargs)
        check_value("tool_timeout_s", tool_timeout_s, "None sets no deadline", above=0, optional=True)
        check_value("malformed_calls", malformed_calls, choices=MALFORMED)
        self._keeps_malformed = malformed_calls == "error"
        self.tool_schemas: list[dict[str, Any]] = [tool_schema(tool) for tool in tools]
        self.tool_map: dict[str, Callable[..., Any]] = {tool.__name__: tool for tool in tools}
        check_names(tools)
        self._tool_timeout_s = tool_timeout_s
        self.num_calls = 0
        """Calls of tools so far, or in the present answer for an agent that begins again with
        each."""
        self.num_failed = 0
        """Calls whose result is an error."""

    def _tool_request(self) -> ToolRequest:
        """A request that offers all tools, with `tool_choice` auto."""
        return ToolRequest(tools=self.tool_schemas, tool_choice="auto", keep_malformed=self._keeps_malformed)

    def _with_tools(self, inference: InferenceSpec | None) -> InferenceSpec:
        """The same settings with token ids requested, because tool calls are trained like any other
        action."""
        spec = inference or InferenceSpec()
        return replace(spec, return_=replace(spec.return_, return_token_ids=True))

    def _extract_openai_message(self, info: Mapping[str, Any]) -> tuple[str | None, list[ToolCall]]:
        """(content, tool calls) of the server's message; (completion, no calls) if the response
        has no OpenAI message."""
        try:
            message = info["raw_response"]["choices"][0]["message"]
            return message.get("content"), list(message.get("tool_calls") or [])
        except (KeyError, IndexError, TypeError, AttributeError):
            return info.get("completion"), []

    async def _run_tool_calls(self, tool_calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls one after another and add each result to the context, errors included."""
        results = []
        for call in tool_calls:
            result = await self._call_tool(call)
            self.num_calls += 1
            self.num_failed += result.failed
            self._ctx.add_tool_result(str(call.get("id") or ""), call_name(call), result.text)
            results.append(result)
        return results

    async def _call_tool(self, call: ToolCall) -> ToolResult:
        name = call_name(call)
        if "error" in call:
            return ToolResult(f"Error: the call cannot be read: {call['error']}. Write it again.", True)
        tool = self.tool_map.get(name)
        if tool is None:
            return ToolResult(f"Error: Tool {name} not found. The tools are: {', '.join(self.tool_map) or 'none'}.", True)
        try:
            arguments = read_arguments(tool, call_arguments(call))
        except Exception as error:  # a type of the user's may raise anything
            return ToolResult(f"Error: {error}", True)
        try:
            return ToolResult(str(await run_tool(tool, arguments, self._tool_timeout_s)))
        except EpisodeLost:
            raise
        except ToolError as error:
            return ToolResult(f"Error: {str(error).removeprefix('Error: ')}", True)
        except (Exception, SystemExit) as error:
            logger.info("tool %s failed with %s: %s", name, type(error).__name__, error)
            return ToolResult(f"Error executing tool {name}: {type(error).__name__}: {error}", True)


class ToolTimeoutError(LudicError, TimeoutError):
    """A tool returned no result before its deadline."""


async def run_tool(tool: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float | None) -> Any:
    """Run the tool and return its result. A coroutine function runs on the event loop, any other
    function in its own thread. After the deadline that thread continues, because Python cannot stop
    it.

    Raises what the tool raises, and ToolTimeoutError after `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            if inspect.iscoroutinefunction(tool):
                return await tool(**arguments)
            return await await_if_needed(await run_in_daemon_thread(lambda: tool(**arguments), name="tool"))
    except TimeoutError:
        if deadline.expired():
            raise ToolTimeoutError(f"no result within {timeout_s} s") from None
        raise


CALLS_INFO, FAILED_INFO = "tools/calls", "tools/failed"
"""Keys of the info of an answer: the calls of tools before it, and how many of them failed."""
OUT_OF_STEPS: Message = {
    "role": "user",
    "content": "You have exhausted your reasoning steps and can call no more tools. Give your final answer now.",
}


class ReActAgent(ToolAgent):
    """Calls the model up to `max_react_steps` times for each action (ReAct, arXiv:2210.03629).

    After a response with tool calls the tools are run and the model is called again. A response
    without tool calls is the answer and is parsed. The last call offers no tools, and a message
    that is not stored in the context tells the model so. `act` returns the answer. The calls before
    it are in `intermediate_calls`; the protocol turns them into steps of the same rollout, so that
    they are trained as well. The info of the answer has the number of calls, `tools/calls`, and how
    many of them failed, `tools/failed`.

    With `reject_incomplete_completions`, a response that reached the token limit ends `act`, and
    its tools are not run.
    """

    name = "react_agent"

    def __init__(self, tools: Sequence[Callable[..., Any]], max_react_steps: int = 5, **kwargs: Any) -> None:
        super().__init__(tools, **kwargs)
        if not getattr(self._ctx, "supports_tools", False):
            raise ConfigTypeError(f"the context ({type(self._ctx).__name__}) of {type(self).__name__} needs supports_tools=True")
        check_value("max_react_steps", max_react_steps, "the last step is the answer", least=1)
        self.max_react_steps = max_react_steps

    async def act(
        self, inference: InferenceSpec | None = None, sampling_seed: int | None = None, timeout_s: float | None = None
    ) -> tuple[ParseResult, str, dict[str, Any], TokenTrace | None]:
        """(parsed, raw text, info, trace) of the answer. `timeout_s` applies to each model call;
        each call has its own sampling seed."""
        self.intermediate_calls = []
        self.num_calls = self.num_failed = 0
        spec = self._with_tools(inference)
        for call in range(self.max_react_steps):
            last = call == self.max_react_steps - 1
            messages = self._ctx.on_before_act()
            response, info, self.last_info, trace = await self._infer_once(
                messages=[*messages, OUT_OF_STEPS] if last else messages,
                inference=spec,
                sampling_seed=call_seed(sampling_seed, call),
                timeout_s=timeout_s,
                tools=None if last or not self.tool_schemas else self._tool_request(),
            )
            ends = last or self._is_rejected(response)
            content, tool_calls = (response.text, []) if ends else self._extract_openai_message(info)
            if not tool_calls:
                answer = replace(response, text=content or "")
                self._ctx.add_assistant_step(answer.text, None)
                info |= {CALLS_INFO: self.num_calls, FAILED_INFO: self.num_failed}
                return self._parse(answer, info), answer.text, info, trace
            self._ctx.add_assistant_step(content, tool_calls)
            results = await self._run_tool_calls(tool_calls)
            info["chat_completion"] = {"role": "assistant", "content": content or "", "tool_calls": tool_calls}
            info["tool_results"], info["tool_failed"] = [each.text for each in results], [each.failed for each in results]
            self.intermediate_calls.append(IntermediateCall(response.text, info, trace, "\n".join(info["tool_results"])))
        raise AssertionError("the last call returns")


Tool = Callable[..., Any]


@dataclass(frozen=True)
class ToolUse:
    """Plain or coroutine functions that the model may call before each of its answers.

    >>> use = ToolUse((look_up,), max_turns=2)
    >>> use.make_agent(client=client, model="m", ctx=ctx, parser=parser)
    """

    functions: tuple[Tool, ...]
    """What the model is told of each is its name, docstring and type hints."""
    max_turns: int = 4
    """Model calls in which it may call tools; the one after them is the answer."""
    timeout_s: float | None = 30.0
    """Deadline of one tool call. None means no deadline."""
    malformed_calls: str = "error"
    """As of a `ToolAgent`."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a limit that is too small, and for functions that a model cannot
        be told of."""
        if not self.functions:
            raise ConfigError("there are no tools; give at least one function")
        check_value("max_tool_turns", self.max_turns, "to train without tools, leave tools out", least=1)
        check_value("tool_timeout_s", self.timeout_s, "null sets no deadline", above=0, optional=True)
        for function in self.functions:
            check_tool(function)
        check_names(self.functions)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What a chat template is given, one for each function."""
        return [tool_schema(function) for function in self.functions]

    def close(self) -> None:
        """End the servers of tools; the next call starts them again."""
        for function in self.functions:
            if isinstance(function, McpTool):
                function.server.close()

    def make_agent(self, **settings: Any) -> ReActAgent:
        """The agent of one episode. `settings` are arguments of `Agent`."""
        limits: dict[str, Any] = {"tool_timeout_s": self.timeout_s, "malformed_calls": self.malformed_calls}
        return ReActAgent(self.functions, self.max_turns + 1, **limits, **settings)


def check_tool(function: Tool) -> Mapping[str, Any]:
    """The schema of a function. Raises ConfigError for one that a model cannot call, or that has
    no docstring or no type hint for a parameter, which are all that the model is told."""
    schema = tool_schema(function)
    name = function.__name__
    if isinstance(function, McpTool):
        return schema
    if inspect.isclass(function):
        raise ConfigError(f"the tool {name} is a class; give a function")
    if not (inspect.getdoc(function) or "").strip():
        raise ConfigError(f"the tool {name} has no docstring, by which a model knows what it is for; write one")
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_POSITIONAL for each in parameters.values()):
        raise ConfigError(f"the tool {name} takes *arguments, which have no names; take a list, such as items: list[str]")
    hinted = [each for each in parameters.values() if each.kind is not each.VAR_KEYWORD]
    without = [each.name for each in hinted if each.annotation is each.empty]
    if without:
        raise ConfigError(f"the tool {name} has no type hint for {', '.join(without)}; write one, such as {without[0]}: str")
    return schema


_GIVEN = GivenNames[Tool]("tools")
given_tools = _GIVEN.given


def find_tools(names: Any, **mcp: Any) -> tuple[Tool, ...]:
    """The functions of the setting `tools`: `module:function`, `mcp:COMMAND` or `mcp:URL` for all
    tools of a server, or a list of these; none for null and for an empty list. `mcp`: arguments of
    `McpServer`. Raises ConfigError for a name that is not known, and for a server that cannot be
    started."""
    found = [McpServer(name, **mcp).tools if name.startswith(PREFIX) else (_find(name),) for name in list_tools(names)]
    return tuple(tool for tools in found for tool in tools)


def check_tools(names: Any) -> None:
    """Raise ConfigError for a function of the setting `tools` that is not known or that a model
    cannot be told of, and for a command that is not found. No server is started."""
    for name in list_tools(names):
        if name.startswith(PREFIX):
            check_source(name)
        else:
            check_tool(_find(name))


def list_tools(names: Any) -> Sequence[str]:
    """The names in the setting `tools`. Raises ConfigError unless it is a name or a list of
    names."""
    listed = [names] if isinstance(names, str) else [] if names is None else names
    if not isinstance(listed, Sequence) or not all(isinstance(name, str) for name in listed):
        raise ConfigError(f"tools ({names!r}) must be module:function, or a list of such names")
    return listed


def _find(name: str) -> Tool:
    given = _GIVEN.now
    if name in given:
        return given[name]
    if ":" not in name:
        module, _, function_name = name.rpartition(".")
        where = f"write {module}:{function_name}"
        if not module:
            where = (
                f"if it is a function of a script, put it into a file, such as my_tools.py, and give tools=[my_tools:{name}]; the script "
                "itself can go on with train(resume=True)"
            )
        raise ConfigError(f"tools ({name}) is not known; {where}")
    function: Tool = import_named(name, "tools")
    return function
