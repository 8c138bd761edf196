"""A model behind an OpenAI-compatible server: `POST {base_url}/chat/completions` and nothing else that is specific to one server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from ludic.errors import ConfigError, InferenceError
from ludic.inference.request import ChatCompletionRequest
from ludic.types import ChatResponse

if TYPE_CHECKING:
    from openai import AsyncOpenAI

TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
"""Besides 500 and above: the server asks to come again."""
LONGEST_WAIT_S = 60.0
"""Between two attempts, whatever the server's Retry-After says."""


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
        if timeout_s <= 0 or max_retries < 0 or backoff_s < 0:
            raise ConfigError(
                f"timeout_s ({timeout_s}) must be > 0, max_retries ({max_retries}) and backoff_s ({backoff_s}) must be >= 0"
            )
        self.base_url = base_url.rstrip("/")
        self.timeout_s, self.max_retries, self.backoff_s = timeout_s, max_retries, backoff_s
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

        async def attempt() -> Any:
            return await call(self._client())

        attempts = AsyncRetrying(
            stop=stop_after_attempt(1 + self.max_retries),
            wait=self._wait_s,
            retry=retry_if_exception(_is_transient),
            reraise=True,
        )
        try:
            async with asyncio.timeout(self.timeout_s):
                return await attempts(attempt)
        except TimeoutError as error:
            raise TimeoutError(f"{self.base_url} gave no answer within {self.timeout_s} s") from error
        except (OpenAIError, ValueError) as error:  # a body that is no JSON is a ValueError
            raise InferenceError(f"{self.base_url} gave no completion: {type(error).__name__}: {error}") from error

    def _wait_s(self, state: RetryCallState) -> float:
        """Seconds until the next attempt."""
        backoff = wait_random_exponential(multiplier=self.backoff_s, max=LONGEST_WAIT_S)(state)
        error = state.outcome.exception() if state.outcome is not None else None
        return max(backoff, _retry_after_s(error))

    def _client(self) -> AsyncOpenAI:
        """Made when first needed: importing openai takes a second."""
        from openai import AsyncOpenAI

        if self._opened is None:
            client = AsyncOpenAI(base_url=self.base_url, api_key=self._api_key, max_retries=0, timeout=self.timeout_s)
            client.organization = client.project = None  # the environment's are not for other servers
            self._opened = client
        return self._opened


def _is_transient(error: BaseException) -> bool:
    from openai import APIConnectionError, APIStatusError

    if isinstance(error, APIStatusError):
        return error.status_code in TRANSIENT_STATUS or error.status_code >= 500
    return isinstance(error, APIConnectionError)


def _retry_after_s(error: BaseException | None) -> float:
    """What the server asked for in seconds, if it did."""
    response = getattr(error, "response", None)
    try:
        return min(LONGEST_WAIT_S, max(0.0, float(response.headers.get("retry-after", 0.0)))) if response is not None else 0.0
    except ValueError:  # a date
        return 0.0


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
