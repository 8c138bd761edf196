"""Awaits the results of environments whose methods are coroutine functions."""

from __future__ import annotations

from typing import Any

from ludic.event_loop import await_if_needed


async def await_results(results: Any) -> dict[str, Any]:
    """The results of `reset` or `step` by agent. The dictionary and its values may be
    awaitables."""
    by_agent = await await_if_needed(results)
    return {agent_id: await await_if_needed(result) for agent_id, result in by_agent.items()}
