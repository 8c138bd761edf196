"""A model behind an OpenAI-compatible server: `POST {base_url}/chat/completions` and nothing else that is specific to one server."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ludic.errors import ConfigError, InferenceError
from ludic.inference.request import ChatCompletionRequest
from ludic.inference.servers.persistence import Persistence, is_transient
from ludic.types import ChatResponse

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CONNECT_TIMEOUT_S = 30.0
CONNECTIONS = 1000
KEEPALIVE_S = 2.0
"""How long an idle connection is used again. Servers close theirs after 5 s, some of them just as the next request is on its way."""


class OpenAIChatClient:
    """Chat completions over HTTP, with a deadline and retries.

    A call takes at most `timeout_s`, retries and the waits between them included. Connections that fail and the statuses 408, 409, 425,
    429 and 500 and above are tried again up to `max_retries` times, after the server's Retry-After or a random wait that grows from
    `backoff_s`; anything else that is no completion is an InferenceError at once.

    Token ids come back only from servers that know vLLM's `return_token_ids`, and are asked for only with `returns_token_ids`; without
    them an evaluation has no traces, and training is not possible. Weights cannot be pushed through this interface.

    `api_key` is sent to `base_url` as it is given, and no key of the environment is. The client belongs to the event loop that first
    uses it; close it there with `aclose`, or use it as an asynchronous context manager.
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
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url ({base_url}) must begin with http:// or https://, such as http://127.0.0.1:8000/v1")
        self.base_url = base_url.rstrip("/")
        self._persistence = Persistence(timeout_s, max_retries, backoff_s)
        self.returns_token_ids = returns_token_ids
        self._api_key = api_key
        self._opened: AsyncOpenAI | None = None

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        """One completion. The info has `raw_response` and `used_args`.

        Raises TimeoutError after `timeout_s`, InferenceError for an answer that is none, ConfigError for settings that this interface
        does not have.
        """
        if request.extensions is not None:
            raise ConfigError(f"unsupported request.extensions: {type(request.extensions).__name__}; OpenAIChatClient has none")
        arguments = self._arguments(request)
        answer = await self._within_deadline(lambda client: client.chat.completions.create(**arguments))
        payload = _as_object(answer, self.base_url)
        return _response(payload, self.base_url), {"raw_response": payload, "used_args": arguments}

    async def models(self) -> list[str]:
        """Names of the models that the server offers."""
        payload = _as_object(await self._within_deadline(lambda client: client.models.list()), self.base_url)
        return [str(model["id"]) for model in payload.get("data") or [] if isinstance(model, Mapping) and "id" in model]

    def sync_weights(self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
        """Always an InferenceError: OpenAI's interface has no such thing."""
        raise InferenceError(
            f"{self.base_url} is spoken to in OpenAI's interface, which takes no weights; use a client that can push"
        )

    async def aclose(self) -> None:
        """Close the connections."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()

    async def __aenter__(self) -> OpenAIChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _arguments(self, request: ChatCompletionRequest) -> dict[str, Any]:
        """Keywords of the request's body."""
        arguments: dict[str, Any] = {
            "model": request.model,
            "messages": request.messages,
            **request.sampling.to_openai_kwargs(),
        }
        if request.seed is not None:
            arguments["seed"] = request.seed
        if request.tools is not None:
            arguments["tools"] = request.tools.tools
            if request.tools.tool_choice is not None:
                arguments["tool_choice"] = request.tools.tool_choice
        if request.return_.return_chosen_logprobs:
            arguments["logprobs"] = True
            if request.return_.top_logprobs_k > 1:
                arguments["top_logprobs"] = request.return_.top_logprobs_k
        if request.return_.return_token_ids and self.returns_token_ids:
            arguments["extra_body"] = {"return_token_ids": True}
        return arguments

    async def _within_deadline(self, call: Callable[[AsyncOpenAI], Awaitable[Any]]) -> Any:
        """The answer to `call(client)`, tried as often as allowed."""
        from openai import OpenAIError

        try:
            return await self._persistence.carry_out(lambda: call(self._client()), name=self.base_url, again=is_transient)
        except (OpenAIError, ValueError) as error:  # a body that is no JSON is a ValueError
            raise InferenceError(f"{self.base_url} gave no completion: {type(error).__name__}: {error}") from error

    def _client(self) -> AsyncOpenAI:
        """Made when first needed: importing openai takes a second."""
        if self._opened is None:
            self._opened = open_client(self.base_url, api_key=self._api_key, timeout_s=self._persistence.timeout_s)
        return self._opened


def open_client(base_url: str, *, api_key: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> AsyncOpenAI:
    """A client that tries nothing again by itself, sends no name of the environment's, and asks no proxy for this machine."""
    from openai import DEFAULT_CONNECTION_LIMITS, AsyncOpenAI, DefaultAsyncHttpxClient, Timeout

    timeout = Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
    limits = type(DEFAULT_CONNECTION_LIMITS)(
        max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS, keepalive_expiry=KEEPALIVE_S
    )
    secure = base_url.startswith("https://")  # without it there is nothing to verify, and loading certificates takes a while
    http = DefaultAsyncHttpxClient(timeout=timeout, limits=limits, trust_env=not is_loopback(base_url), verify=secure)
    client = AsyncOpenAI(
        base_url=base_url, api_key=api_key, max_retries=0, timeout=timeout, http_client=http, default_headers=headers
    )
    client.organization = client.project = None  # the environment's are not for other servers
    return client


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _as_object(answer: Any, base_url: str) -> dict[str, Any]:
    dump = getattr(answer, "model_dump", None)
    if dump is None:
        raise InferenceError(f"{base_url} answered {str(answer)[:200]!r}, which is no JSON object; is this the right base_url?")
    payload: dict[str, Any] = dump(exclude_none=True, warnings=False)
    return payload


def _response(payload: Mapping[str, Any], base_url: str) -> ChatResponse:
    """What the first choice says. Raises InferenceError if there is none, or if the server gave up on it."""
    choices = payload.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or not isinstance(message, Mapping):
        raise InferenceError(f"{base_url} answered without a choice that has a message: {str(dict(payload))[:200]}")
    if choice.get("finish_reason") == "abort":
        raise InferenceError(f"{base_url} aborted the request; what it had sampled is no whole answer")
    text = message.get("content", "")
    if not isinstance(text, str):
        raise InferenceError(f"{base_url} answered with content of type {type(text).__name__}; it must be text")
    return ChatResponse(
        text=text,
        completion_token_ids=choice.get("token_ids"),
        completion_logprobs=_logprobs(choice),
        finish_reason=choice.get("finish_reason"),
        prompt_token_ids=payload.get("prompt_token_ids", choice.get("prompt_token_ids")),
    )


def _logprobs(choice: Mapping[str, Any]) -> list[float] | None:
    content = (choice.get("logprobs") or {}).get("content")
    return None if not content else [float(entry["logprob"]) for entry in content]
