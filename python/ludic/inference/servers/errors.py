"""Maps the status of an HTTP response to an error: try again, the engine is dead, or a bad
request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from ludic.errors import EngineDeadError, InferenceError, ServerError, ServerUnreachableError, check_value

TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which a retry may succeed. Statuses of 500 and above are transient
too."""
DEAD_MARKS = ("EngineCore encountered an issue", "EngineDeadError", "EngineGenerateError")
"""Text in the body of a 500 by which vLLM reports that its engine has died."""
MAX_QUOTED_CHARS = 500
"""Length of a quotation in an error message."""


class AbortedError(InferenceError):
    """The server aborted a request, so its partial output is discarded. The request can be
    retried."""


class StaleWeightsError(EngineDeadError):
    """A server answered with weights that no client may sample from: it was restarted and has those
    that it began with, or it missed a push."""


class BusyError(ServerError):
    """The server asks for a retry."""

    def __init__(self, message: str, *, status: int, retry_after_s: float) -> None:
        super().__init__(message, status=status)
        self.retry_after_s = retry_after_s
        """0 if the response has no Retry-After header."""


def is_retryable(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    return isinstance(error, BusyError | AbortedError | ServerUnreachableError)


def is_missing_endpoint(error: Exception) -> bool:
    """Whether the server lacks the endpoint. False for a 404 that is due to an unknown model."""
    return isinstance(error, ServerError) and error.status in (403, 404, 405) and "model" not in error.reason.lower()


def quote_body(body: str) -> str:
    """The beginning of a body on one line, for an error message; `nothing` for an empty body."""
    return " ".join(body.split())[:MAX_QUOTED_CHARS] or "nothing"


def status_error(url: str, status: int, body: str, headers: Mapping[str, str]) -> InferenceError:
    """The error for a response whose status is not 2xx."""
    excerpt = quote_body(body)
    if status >= 500 and any(mark in body for mark in DEAD_MARKS):
        return EngineDeadError(f"the engine of {url} is dead ({excerpt}); restart the server and push the weights to it")
    if status in TRANSIENT_STATUS or status >= 500:
        return BusyError(f"{url} answered {status}: {excerpt}", status=status, retry_after_s=_retry_after_s(headers))
    if 300 <= status < 400:
        target = headers.get("location", "nowhere")[:MAX_QUOTED_CHARS]
        return ServerError(
            f"{url} answered {status} and redirects to {target}; redirects are not followed because requests carry prompts and keys: "
            "use the final address",
            status=status,
        )
    return ServerError(f"{url} answered {status}: {excerpt}", status=status, reason=body)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return max(0.0, float(headers.get("retry-after", 0.0)))
    except ValueError:  # an HTTP date
        return 0.0


T = TypeVar("T")

LONGEST_WAIT_S = 60.0
"""Limit on the wait between two attempts, even if the server's Retry-After is longer."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long and how often a call is attempted."""

    timeout_s: float
    """Limit on all attempts and the waits between them."""
    max_retries: int
    backoff_s: float
    """Scale of the first random wait."""
    backoff_growth: float = 2.0
    """Factor by which the scale grows with each retry."""

    def __post_init__(self) -> None:
        check_value("timeout_s", self.timeout_s, above=0)
        check_value("max_retries", self.max_retries, least=0)
        check_value("backoff_s", self.backoff_s, least=0)
        check_value("backoff_growth", self.backoff_growth, least=1)

    async def run(self, attempt: Callable[[], Awaitable[T]], *, name: str) -> T:
        """Return the result of `attempt`, which is repeated after each retryable error. Raises
        TimeoutError, with the server's `name`, after `timeout_s`."""

        async def once() -> T:  # tenacity awaits only what coroutine functions return
            return await attempt()

        attempts = AsyncRetrying(
            stop=stop_after_attempt(1 + self.max_retries), wait=self._wait_s, retry=retry_if_exception(is_retryable), reraise=True
        )
        try:
            async with asyncio.timeout(self.timeout_s):
                return await attempts(once)
        except TimeoutError as error:
            raise TimeoutError(f"{name} gave no answer within {self.timeout_s} s") from error

    def _wait_s(self, state: RetryCallState) -> float:
        """Seconds until the next attempt."""
        backoff = wait_random_exponential(multiplier=self.backoff_s, exp_base=self.backoff_growth, max=LONGEST_WAIT_S)(state)
        error = state.outcome.exception() if state.outcome is not None else None
        return max(backoff, min(LONGEST_WAIT_S, error.retry_after_s)) if isinstance(error, BusyError) else backoff
