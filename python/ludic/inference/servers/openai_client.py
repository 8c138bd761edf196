"""A model behind any OpenAI-compatible server. Uses only `POST {base_url}/chat/completions` and
`GET {base_url}/models`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from ludic.errors import InferenceError
from ludic.images.content import to_openai
from ludic.images.store import current_store
from ludic.inference.request import ChatCompletionRequest, chat_fields, refuse_extensions, request_body
from ludic.inference.servers.answers import ModelList, drop_nulls
from ludic.inference.servers.errors import RetryPolicy
from ludic.inference.servers.http import CONNECT_TIMEOUT_S, AsyncClosing, Http, HttpResponse, check_scheme, is_loopback_url
from ludic.inference.vllm.responses import ChatMessage, Logprobs, ResponseReader
from ludic.types import ChatResponse

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class OpenAIChatClient(AsyncClosing):
    """Chat completions over HTTP, with a deadline and retries.

    A call takes at most `timeout_s`, including retries and the waits between them. Failed
    connections and the statuses 408, 409, 425, 429 and 500 and above are retried up to
    `max_retries` times, after the server's Retry-After or a random wait that grows from
    `backoff_s`. Anything else that is not a completion raises InferenceError immediately.

    Token ids are requested only with `returns_token_ids=True`, which needs a server that supports
    vLLM's `return_token_ids`, and responses with them are checked like responses of vLLM. Without
    them an evaluation has no traces and training is impossible.
    Weights cannot be pushed through this interface.

    `chat_template_kwargs` are arguments of the server's chat template; arguments of a request
    override them. `api_key` is sent to `base_url`; keys in the environment are not. The client
    belongs to the event loop that first uses it: close it there with `aclose`, or use it as an
    asynchronous context manager.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "none",
        timeout_s: float = 120.0,
        max_retries: int = 3,
        backoff_s: float = 0.5,
        returns_token_ids: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_scheme("base_url", base_url)
        self.base_url = base_url.rstrip("/")
        self._retries = RetryPolicy(timeout_s, max_retries, backoff_s)
        self.returns_token_ids = returns_token_ids
        self._template_kwargs = chat_template_kwargs or {}
        self._http = Http({"Authorization": f"Bearer {api_key}"})

    async def complete(
        self, request: ChatCompletionRequest, *, schema: Mapping[str, Any] | None = None
    ) -> tuple[ChatResponse, dict[str, Any]]:
        """One completion. The info has `raw_response` and `used_args`. `schema`: a JSON schema that
        the text must follow, which servers enforce by constrained decoding (`response_format`).

        Raises TimeoutError after `timeout_s`, InferenceError for a response that is not a
        completion, and ConfigError for settings that this interface does not have.
        """
        refuse_extensions(request, self)
        arguments = self._arguments(request)
        if schema is not None:
            named = {"name": "answer", "strict": True, "schema": schema}
            arguments["response_format"] = {"type": "json_schema", "json_schema": named}
        body = request_body(arguments)
        body["messages"] = to_openai(body["messages"], current_store())
        response = await self._request("POST", "/chat/completions", body)
        if "extra_body" in arguments:
            chat, payload = ResponseReader(self.base_url).read_chat(response, request)
            return chat, {"raw_response": payload, "used_args": arguments}
        info = {"raw_response": drop_nulls(response.json()), "used_args": arguments}
        return response.read(_Completion).response(self.base_url), info

    async def models(self) -> list[str]:
        """Names of the models that the server offers."""
        return [model.id for model in (await self._request("GET", "/models")).read(ModelList).data]

    def sync_weights(self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
        """Always raises InferenceError: OpenAI's interface cannot replace weights."""
        raise InferenceError(f"{self.base_url} has OpenAI's interface, which cannot replace weights; use another client")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _arguments(self, request: ChatCompletionRequest) -> dict[str, Any]:
        arguments = chat_fields(replace(request, chat_template_kwargs={**self._template_kwargs, **request.chat_template_kwargs}))
        if request.return_.return_chosen_logprobs:
            arguments["logprobs"] = True
            if request.return_.top_logprobs_k > 1:
                arguments["top_logprobs"] = request.return_.top_logprobs_k
        if request.return_.return_token_ids and self.returns_token_ids:
            arguments["extra_body"] = {**arguments.get("extra_body", {}), "return_token_ids": True}
        return arguments

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> HttpResponse:
        timeout_s = self._retries.timeout_s

        async def attempt() -> HttpResponse:
            response = await self._http.request(method, f"{self.base_url}{path}", json=body, timeout_s=timeout_s)
            return response.raise_for_status()

        return await self._retries.run(attempt, name=self.base_url)


def open_client(base_url: str, *, api_key: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> AsyncOpenAI:
    """A client of the openai package without retries or redirects. It ignores the organization and
    project of the environment, and uses no proxy for this machine."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Timeout

    timeout = Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
    http = DefaultAsyncHttpxClient(timeout=timeout, trust_env=not is_loopback_url(base_url), follow_redirects=False)
    client = AsyncOpenAI(
        base_url=base_url, api_key=api_key, max_retries=0, timeout=timeout, http_client=http, default_headers=headers
    )
    client.organization = client.project = None  # the environment's are for OpenAI's own servers
    return client


class _Choice(Struct):
    message: ChatMessage
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class _Completion(Struct):
    choices: Annotated[list[_Choice], Meta(min_length=1)]

    def response(self, base_url: str) -> ChatResponse:
        """The first choice. Raises InferenceError if the server aborted it."""
        choice = self.choices[0]
        if choice.finish_reason == "abort":
            raise InferenceError(f"{base_url} aborted the request; its partial output is discarded")
        return ChatResponse(
            text=choice.message.content or "",
            completion_logprobs=None if choice.logprobs is None else choice.logprobs.values() or None,
            finish_reason=choice.finish_reason,
        )
