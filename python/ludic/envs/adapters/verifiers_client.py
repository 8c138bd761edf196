"""A client that answers for the model in verifiers (`verifiers.v1`, 0.4).

verifiers plays an episode itself: a harness sends chat requests to a server on this machine, which
asks a client for each answer and writes the trace. `VerifiersClient` is such a client, on top of a
`ChatClient`.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

from ludic.envs.adapters.episode import import_extra
from ludic.errors import InferenceError
from ludic.inference.client import ChatClient
from ludic.inference.request import ChatCompletionRequest, InferenceSpec, ToolRequest
from ludic.types import ChatResponse

CONNECT_TIMEOUT_S = 5.0
"""For a connection to the server on this machine."""


class VerifiersClient:
    """Answers the requests of one episode with `client`. Has the methods of `verifiers.v1.Client`.

    `inference` decides how tokens are sampled, whatever the harness requests. `seed_of` maps the
    number of the call to its sampling seed. `error` is the first error: verifiers keeps only its
    text.
    """

    def __init__(
        self, client: ChatClient, inference: InferenceSpec, seed_of: Callable[[int], int | None], timeout_s: float | None
    ) -> None:
        self._client = client
        self._inference = inference
        self._seed_of = seed_of
        self._timeout_s = timeout_s
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
            raise InferenceError(
                f"the harness uses {type(dialect).__name__}; only chat completions keep their tokens: use a harness that requests those"
            )
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
    tool_calls = _tool_calls(info)
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


def _tool_calls(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool calls in the server's response, in OpenAI's format."""
    choices = (info.get("raw_response") or {}).get("choices") or [{}]
    return list((choices[0].get("message") or {}).get("tool_calls") or [])


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
