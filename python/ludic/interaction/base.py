"""How agents and an environment play one episode."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ludic.envs.env import LudicEnv
from ludic.inference.request import InferenceSpec
from ludic.types import Rollout


class InteractionProtocol(ABC):
    """Runs one episode and returns a rollout for each agent."""

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
        """`timeout_s` bounds each model call. Raises TimeoutError when one takes longer."""


def derived_seed(seed: int | None, step: int) -> int | None:
    """The sampling seed of a step: the episode's own at step 0, then others that follow from it (SplitMix64, Steele et al. 2014)."""
    if seed is None or step == 0:
        return seed
    mixed = (seed + step * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 31)) % 2**31
