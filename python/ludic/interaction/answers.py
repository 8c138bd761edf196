"""Awaits the results of environments, which may be awaitables."""

from __future__ import annotations

import inspect
from typing import Any


async def await_results(results: Any) -> dict[str, Any]:
    """The dictionary that `reset` or `step` returned, by agent. The dictionary or any of its values
    may be an awaitable."""
    by_agent = await results if inspect.isawaitable(results) else results
    return {agent_id: await result if inspect.isawaitable(result) else result for agent_id, result in by_agent.items()}
