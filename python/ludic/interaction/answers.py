"""What an environment answered, waited for where it is still to come."""

from __future__ import annotations

import inspect
from typing import Any


async def answers_of(by_agent: Any) -> dict[str, Any]:
    """The dictionary that `reset` or `step` returned. The whole of it, or the part of any agent,
    may be an awaitable."""
    whole = await by_agent if inspect.isawaitable(by_agent) else by_agent
    return {agent_id: await part if inspect.isawaitable(part) else part for agent_id, part in whole.items()}
