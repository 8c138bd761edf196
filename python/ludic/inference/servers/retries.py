"""Calls over the network: one deadline for all attempts, and which failures are worth another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from ludic.errors import ConfigError
from ludic.inference.servers.errors import BusyError

T = TypeVar("T")

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
        """What `attempt` gives, tried as often as allowed while `again` says so of its error.
        TimeoutError names the server."""

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
        return max(backoff, min(LONGEST_WAIT_S, error.retry_after_s)) if isinstance(error, BusyError) else backoff
