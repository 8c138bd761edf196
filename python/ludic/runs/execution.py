"""Ends what a task has started, and records how long its programs ran."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ludic.tasks import EpisodicTask


@asynccontextmanager
async def ending_task(task: EpisodicTask | None, seconds: dict[str, float]) -> AsyncIterator[None]:
    """At the end, add the task's `execution_s` to `seconds` and close it."""
    try:
        yield
    finally:
        if task is not None:
            await task.aclose()
            if task.execution_s is not None:
                seconds["execution"] = seconds.get("execution", 0.0) + task.execution_s
