"""The interface of interaction protocols."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ludic.envs.env import LudicEnv
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
