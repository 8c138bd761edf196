"""Retries of network calls: one deadline for all attempts, backoff between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from ludic.errors import ConfigError
from ludic.inference.servers.errors import BusyError, is_retryable

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
        if not self.timeout_s > 0 or self.max_retries < 0 or self.backoff_s < 0 or not self.backoff_growth >= 1:
            raise ConfigError(
                f"timeout_s ({self.timeout_s}) must be > 0, max_retries ({self.max_retries}) and backoff_s ({self.backoff_s}) "
                f"must be >= 0, backoff_growth ({self.backoff_growth}) must be >= 1"
            )

    async def run(self, attempt: Callable[[], Awaitable[T]], *, name: str) -> T:
        """Return the result of `attempt`, which is repeated after each retryable error. Raises
        TimeoutError, with the server's `name`, after `timeout_s`."""

        async def once() -> T:
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
