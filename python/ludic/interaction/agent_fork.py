"""Agents that are functions and run in a process of their own for each episode."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ludic.envs.code_exec.bubblewrap import as_nobody, can_be_read_by_others
from ludic.envs.workspaces.fork_server import ForkServer, serve_forks
from ludic.errors import ConfigError
from ludic.event_loop import await_if_needed, run_to_completion
from ludic.inference.gateway.gateway import HOST, reply_at_once
from ludic.inference.gateway.http import Exchange, HttpServer, Request
from ludic.inference.gateway.session import Session
from ludic.interaction.agent_command import SHOWN, AgentCommand, AgentExitError
from ludic.user_objects import import_named


@dataclass(frozen=True)
class AgentFork(AgentCommand):
    """A function of a module that is an agent: it is called in a process of its own, forked from
    one that has imported the module. `argv` is `module:function` alone.

    The function gets a session without `calls`. Its row must be JSON. In bubblewrap it sees the
    Python that this process has, besides what a command sees.
    """

    _server: ForkServer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        enters = self.chosen_sandbox == "bubblewrap"
        if enters:
            python = [sys.base_prefix, sys.prefix]
            if as_nobody() and (unreadable := [path for path in python if not can_be_read_by_others(Path(path))]):
                raise ConfigError(
                    f"agent.isolate=fork: root runs sandboxes as another user, who cannot read this Python ({unreadable[0]}); "
                    "use one below /usr, do not run as root, or set agent.sandbox=none"
                )
            object.__setattr__(self, "mounts", [*self.mounts, *python])
        object.__setattr__(self, "_server", ForkServer([sys.executable, "-P", "-m", __name__, *self.argv], is_copied=enters))

    def _check_program(self) -> None:
        """The server does."""

    async def start(self, session: Session) -> None:
        """Start the session's workspace and, once, the server. Raises ConfigError if the module
        cannot be imported there."""
        await super().start(session)
        await run_to_completion(asyncio.to_thread(self._server.start))

    async def __call__(self, session: Session) -> Any:
        values = self._values(session)
        given = {name: getattr(session, name) for name in ("api_key", "prompt", "messages", "row", "model", "seed")}
        try:
            told = {"session": json.dumps({**given, "base_url": values["base_url"]})}
        except TypeError as error:
            raise ConfigError(f"agent.isolate=fork sends the row as JSON: {error}; leave that column out") from None
        ended = await session.workspace.fork(self._server, told, self._variables(session, values))
        if ended.code:
            raise AgentExitError(f"{self.argv[0]} ended without an answer: {ended.stderr[-SHOWN:].strip()}", "")
        return json.loads(ended.stdout)

    def close(self) -> None:
        """End the server."""
        self._server.stop()


def check_agent(name: str, function: object) -> Callable[[Session], Any]:
    """The function of the setting `agent.function`. Raises ConfigError for anything that cannot be
    called, and for a class."""
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"agent.function ({name}) is {type(function).__name__}; it must be a function of a session")
    return function


def main(name: str) -> NoReturn:
    """Import an agent, and fork a process for each of its episodes."""
    function = check_agent(name, import_named(name, "agent.function"))

    def call(told: Mapping[str, Any]) -> Any:
        returned = function(Session(**json.loads(told["session"])))
        return asyncio.run(await_if_needed(returned)) if inspect.isawaitable(returned) else returned

    asyncio.run(_use_client())
    serve_forks(call)


async def _use_client() -> None:
    """Have OpenAI's library import and build what it needs for a call: 0.9 s of a processor, of
    which an episode has 0.02 left."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
    completion = {"id": "", "object": "chat.completion", "created": 0, "model": "", "choices": [choice], "usage": usage}
    messages: Any = [{"role": "system", "content": ""}, {"role": "user", "content": ""}, message]
    messages += [{"role": "tool", "tool_call_id": "c", "content": ""}]
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

    async def answer(_: Request) -> Exchange:
        return reply_at_once(completion)

    server = HttpServer(answer)
    session = Session(f"http://{HOST}:{await server.listen(HOST, 0)}/v1", "none", "")
    await session.client().chat.completions.create(model="", messages=messages, tools=tools, timeout=30)
    await session.close_clients()
    await server.close()


if __name__ == "__main__":
    main(sys.argv[1])
