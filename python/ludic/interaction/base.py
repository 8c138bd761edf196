"""The interface of interaction protocols."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ludic.envs.env import LudicEnv
from ludic.event_loop import await_if_needed
from ludic.inference.request import InferenceSpec
from ludic.types import Rollout


class InteractionProtocol(ABC):
    """Plays one episode and returns a rollout for each agent."""

    @abstractmethod
    async def run(
        self,
        *,
        env: LudicEnv[str, str, str],
        max_steps: int,
        env_seed: int | None = None,
        sampling_seed: int | None = None,
        inference: InferenceSpec | None = None,
        timeout_s: float | None = None,
    ) -> list[Rollout]:
        """Play an episode. `timeout_s` is the deadline of each model call, after which TimeoutError
        is raised."""


async def await_results(results: Any) -> dict[str, Any]:
    """The results of `reset` or `step` by agent. The dictionary and its values may be
    awaitables."""
    by_agent = await await_if_needed(results)
    return {agent_id: await await_if_needed(result) for agent_id, result in by_agent.items()}
