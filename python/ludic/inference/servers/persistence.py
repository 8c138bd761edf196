"""Calls over the network: one deadline for all attempts, and which failures are worth another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from ludic.errors import ConfigError

T = TypeVar("T")

TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
"""Besides 500 and above: the server asks to come again."""
LONGEST_WAIT_S = 60.0
"""Between two attempts, whatever the server's Retry-After says."""


@dataclass(frozen=True)
class Persistence:
    """How long and how often something is asked for."""

    timeout_s: float
    """For all attempts and the waits between them."""
    max_retries: int
    backoff_s: float
    """The scale of the first random wait."""
    backoff_growth: float = 2.0
    """By how much the scale of each next one is larger."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0 or self.max_retries < 0 or self.backoff_s < 0 or not self.backoff_growth >= 1:
            raise ConfigError(
                f"timeout_s ({self.timeout_s}) must be > 0, max_retries ({self.max_retries}) and backoff_s ({self.backoff_s}) "
                f"must be >= 0, backoff_growth ({self.backoff_growth}) must be >= 1"
            )

    async def carry_out(self, attempt: Callable[[], Awaitable[T]], *, name: str, again: Callable[[BaseException], bool]) -> T:
        """What `attempt` gives, tried as often as allowed while `again` says so of its error. TimeoutError names the server."""

        async def once() -> T:
            return await attempt()

        attempts = AsyncRetrying(
            stop=stop_after_attempt(1 + self.max_retries), wait=self._wait_s, retry=retry_if_exception(again), reraise=True
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
        return max(backoff, _retry_after_s(error))


def is_transient(error: BaseException) -> bool:
    """Whether a failure of the openai package's may pass: no connection, or a status that asks to come again."""
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
