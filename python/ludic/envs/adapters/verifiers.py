"""Tasks of verifiers (`verifiers.v1`, 0.4) as an environment.

verifiers plays an episode itself: a harness sends chat requests to a server on this machine, which
asks a client for each answer and writes the trace. `VerifiersClient` is such a client, on top of a
`ChatClient`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ludic.envs.adapters.episode import AdaptedEnv, import_extra
from ludic.envs.adapters.verifiers_rollouts import rollout_from_trace
from ludic.errors import ConfigError, InferenceError, RolloutError, check_value
from ludic.inference.client import ChatClient
from ludic.inference.request import ChatCompletionRequest, InferenceSpec, ToolRequest
from ludic.types import ChatResponse, Info, Message, StepOutcome

CLEANUP_TIMEOUT_S = 10.0
"""Time for verifiers to end a cancelled episode."""
CONNECT_TIMEOUT_S = 5.0
"""For a connection to the server on this machine."""


class VerifiersEnv(AdaptedEnv):
    """Tasks of a taskset, `list(verifiers.v1.load_taskset(...))`. The episode with seed s plays
    task number s modulo their count.

    verifiers plays the episode, harness and scoring included. The observation is the messages of
    its request to the model, the action is the answer. A failed episode of verifiers is a
    RolloutError, never a reward. Answers are text: use `VerifiersProtocol`, which connects a chat
    client directly, for tasks that give the model tools, and to keep the harness's prompts token
    for token.

    `agent`: a `verifiers.v1.AgentConfig` (harness, a runtime on this machine, limits); None asks
    the model once, in this process. `timeout_s` bounds the wait for verifiers between two answers
    of the model.
    """

    def __init__(self, tasks: Sequence[Any], *, agent: Any | None = None, timeout_s: float = 60.0) -> None:
        super().__init__("VerifiersEnv")
        import_extra("verifiers.v1", "verifiers")
        if not tasks:
            raise ConfigError("tasks is empty; there is nothing to play")
        check_value("timeout_s", timeout_s, above=0)
        self.agent = agent
        self._tasks = list(tasks)
        self._timeout_s = timeout_s
        self._caller = _Caller()
        self._playing: asyncio.Task[Any] | None = None

    def task(self, seed: int | None) -> Any:
        """The task of a seed; without a seed the first."""
        return self._tasks[(seed or 0) % len(self._tasks)]

    async def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:  # type: ignore[override]  # hooks may be coroutines
        self._episode.begin()
        await self._stop()
        task = self.task(seed)
        self._caller = _Caller()
        policy_client = VerifiersClient(self._caller, InferenceSpec(), lambda call: None, None)
        self._playing = asyncio.create_task(play_task(task, policy_client, self.agent, model="policy", max_turns=None))
        request = await self._next_request()
        if request is None:
            raise self._failed("the episode ended before its first request to the model")
        self._obs = self._shown(request)
        return self._obs, {"task_idx": task.data.idx}

    async def env_step(self, action: str) -> StepOutcome:  # type: ignore[override]
        self._episode.check_step()
        self._caller.answer(action)
        request = await self._next_request()
        if request is not None:
            self._obs = self._shown(request)
            return StepOutcome(obs=self._obs, reward=0.0, truncated=False, terminated=False)
        assert self._playing is not None
        try:
            trace = self._playing.result()
        except Exception as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error
        last = rollout_from_trace(trace).steps[-1]
        scores = {key: last.info[key] for key in ("rewards", "metrics")}
        self._obs = json.dumps(scores)
        return StepOutcome(obs=self._obs, reward=last.reward, truncated=last.truncated, terminated=last.terminated, info=scores)

    async def close(self) -> None:
        """Cancel the episode. Calls after the first do nothing."""
        if self._episode.close():
            await self._stop()

    async def _next_request(self) -> ChatCompletionRequest | None:
        """The next request to the model; None when verifiers has finished. Raises TimeoutError
        after `timeout_s` and cancels the episode."""
        assert self._playing is not None
        request = asyncio.ensure_future(self._caller.requests.get())
        try:
            done, _ = await asyncio.wait({request, self._playing}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not request.done():
                await _cancel(request)
        if request in done:
            return request.result()
        if self._playing in done:
            self._episode.end()
            return None
        self._episode.end()
        await self._stop()
        raise TimeoutError(f"VerifiersEnv: the episode sent no request and did not end within {self._timeout_s} s")

    def _failed(self, problem: str) -> RolloutError:
        if self._playing is not None and self._playing.done() and self._playing.exception() is None:
            errors = self._playing.result().errors
            problem += f" ({errors[-1].type}: {errors[-1].message})" if errors else ""
        return RolloutError(f"VerifiersEnv: {problem}")

    def _shown(self, request: ChatCompletionRequest) -> str:
        """The messages since the last answer, without the system prompt, which is stored."""
        if request.tools is not None:
            raise RolloutError("VerifiersEnv: the task gives the model tools; play it with VerifiersProtocol")
        self._system_prompt = "\n".join(_text(message) for message in request.messages if message["role"] == "system") or None
        news: list[str] = []
        for message in reversed(request.messages):
            if message["role"] == "assistant":
                break
            if message["role"] != "system":
                news.append(_text(message))
        return "\n".join(reversed(news))

    async def _stop(self) -> None:
        """Cancel the episode that is being played."""
        if self._playing is not None:
            playing, self._playing = self._playing, None
            await _cancel(playing)


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, wait for its cleanup, and retrieve its exception, so that asyncio does not
    log it."""
    task.cancel()
    await asyncio.wait({task}, timeout=CLEANUP_TIMEOUT_S)
    if task.done() and not task.cancelled():
        task.exception()


class _Caller:
    """A chat client whose requests wait for `answer`, which the environment calls."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[ChatCompletionRequest] = asyncio.Queue()
        self._answer: asyncio.Future[str] | None = None

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        if self._answer is not None and not self._answer.done():
            raise InferenceError("the harness sent a request before the last was answered; play the task with VerifiersProtocol")
        self._answer = asyncio.get_running_loop().create_future()
        self.requests.put_nowait(request)
        return ChatResponse(text=await self._answer, finish_reason="stop"), {}

    def answer(self, text: str) -> None:
        assert self._answer is not None
        self._answer.set_result(text)

    def sync_weights(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError("answers come from an agent, not from weights")


def _text(message: Message) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.get("text", "") for part in content)


class VerifiersClient:
    """Answers the requests of one episode with `client`. Has the methods of `verifiers.v1.Client`.

    `inference` decides how tokens are sampled, whatever the harness requests. `seed_of` maps the
    number of the call to its sampling seed. `error` is the first error: verifiers keeps only its
    text.
    """

    def __init__(
        self, client: ChatClient, inference: InferenceSpec, seed_of: Callable[[int], int | None], timeout_s: float | None
    ) -> None:
        self._client, self._inference, self._seed_of, self._timeout_s = client, inference, seed_of, timeout_s
        self._calls = 0
        self.error: Exception | None = None

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """One answer as a `verifiers.v1.Response`, with token ids and log-probabilities if the
        client returned them."""
        try:
            request = self._request(dialect, body)
            async with asyncio.timeout(self._timeout_s):
                response, info = await self._client.complete(request)
        except Exception as error:
            self.error = self.error or error
            raise
        return _vf_response(response, info, request.model)

    async def relay(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: a stream is answered as a whole, by `get_response`."""
        raise NotImplementedError("VerifiersClient does not stream")

    async def relay_aux(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("VerifiersClient answers chat completions only")

    async def close(self) -> None:
        """Does nothing: the chat client belongs to its maker."""

    def _request(self, dialect: Any, body: dict[str, Any]) -> ChatCompletionRequest:
        if "messages" not in body or type(dialect).__name__ != "ChatDialect":
            raise InferenceError(f"the harness uses {type(dialect).__name__}; use a harness that requests chat completions")
        tools = body.get("tools")
        seed = self._seed_of(self._calls)
        self._calls += 1
        return ChatCompletionRequest(
            model=str(body.get("model", "")),
            messages=list(body["messages"]),
            sampling=self._inference.sampling,
            return_=self._inference.return_,
            seed=seed,
            tools=ToolRequest(tools=tools, tool_choice=body.get("tool_choice", "auto")) if tools else None,
            extensions=self._inference.extensions,
        )


def _vf_response(response: ChatResponse, info: Mapping[str, Any], model: str) -> Any:
    vf = import_extra("verifiers.v1", "verifiers")
    choices = (info.get("raw_response") or {}).get("choices") or [{}]
    tool_calls = list((choices[0].get("message") or {}).get("tool_calls") or [])  # in OpenAI's format
    text = response.text.encode("utf-8", "replace").decode() or None  # it is sent over HTTP, which takes no half characters
    finish = response.finish_reason if response.finish_reason in ("stop", "length", "tool_calls") else None
    prompt_ids, ids = response.prompt_token_ids, response.completion_token_ids
    tokens = None
    if prompt_ids is not None and ids is not None:
        tokens = vf.TurnTokens(
            prompt_ids=list(prompt_ids), completion_ids=list(ids), completion_logprobs=list(response.completion_logprobs or [])
        )
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if tool_calls:
        message["tool_calls"] = tool_calls
    usage = {"prompt_tokens": len(prompt_ids or []), "completion_tokens": len(ids or [])}
    created = int(time.time())
    raw = {
        "id": "ludic",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish or "stop"}],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }
    return vf.Response(
        id="ludic",
        created=created,
        model=model,
        message=vf.AssistantMessage(
            content=text,
            tool_calls=[
                vf.ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
                for call in tool_calls
            ]
            or None,
        ),
        finish_reason=finish,
        usage=vf.Usage(**usage),
        tokens=tokens,
        raw=raw,
    )


async def play_task(
    task: Any, policy_client: VerifiersClient, agent_config: Any | None, *, model: str, max_turns: int | None
) -> Any:
    """Play a `verifiers.v1.Task` to its end and return the trace. Raises the first error of
    `policy_client`.

    `agent_config`: a `verifiers.v1.AgentConfig`; its model, client and sampling are taken from
    `policy_client`. None asks the model once, in this process, without tools.
    """
    vf = import_extra("verifiers.v1", "verifiers")
    interception = import_extra("verifiers.v1.interception", "verifiers")

    class _EpisodeServer(interception.InterceptionServer):  # type: ignore[name-defined]
        """The server of one episode, on the loopback interface. Its client is `policy_client`."""

        def _client(self, config: Any) -> Any:
            return policy_client

    in_process = agent_config is None
    if agent_config is None:
        agent_config = vf.AgentConfig(harness={"id": "null"}, runtime=vf.SubprocessConfig())
    # a client of this type returns whole answers, even if the harness wants a stream;
    # nothing is sent to its address
    nominal = vf.TrainClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="LUDIC_NO_KEY")
    turns = [limit for limit in (agent_config.max_turns, max_turns) if limit is not None]
    settings = {"model": model, "client": nominal, "max_turns": min(turns) if turns else None}
    async with _EpisodeServer() as server:
        agent = vf.Agent(agent_config.model_copy(update=settings), interception=server)
        if in_process:
            agent.harness = _single_prompt_harness(vf, agent.harness.config)
        trace = await agent.run(task)
    if not trace.ok and policy_client.error is not None:
        raise policy_client.error
    return trace


def _single_prompt_harness(vf: Any, config: Any) -> Any:
    """A harness that sends the task's prompt and ends with the answer."""
    httpx = import_extra("httpx", "verifiers")
    message_to_wire = import_extra("verifiers.v1.dialects.chat", "verifiers").message_to_wire

    class _SinglePromptHarness(vf.Harness):
        APPENDS_SYSTEM_PROMPT = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False
        SUPPORTS_RESUME = True

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
            # the policy client has the deadline; loading no certificates saves time
            timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
            async with httpx.AsyncClient(
                timeout=timeout, trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            ) as http:
                answer = await http.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
            return vf.ProgramResult(exit_code=int(answer.is_error), stdout="", stderr=answer.text if answer.is_error else "")

    return _SinglePromptHarness(config)
