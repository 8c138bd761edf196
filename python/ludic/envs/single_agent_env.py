"""The interface of environments for one agent, without dictionaries by agent."""

from __future__ import annotations

from abc import abstractmethod

from ludic.envs.env import LudicEnv
from ludic.types import Info, StepOutcome


class SingleAgentEnv(LudicEnv[str, str, str]):
    """Implement `env_reset`, `env_step` and `env_current_obs`. They may be coroutine functions."""

    _DEFAULT_ID = "agent_0"

    _agent_id: str = _DEFAULT_ID
    """A default for subclasses that do not call `__init__`."""

    def __init__(self, agent_id: str = _DEFAULT_ID) -> None:
        self._agent_id = agent_id

    @property
    def agent_ids(self) -> list[str]:
        return [self._agent_id]

    @property
    def active_agents(self) -> list[str]:
        return [self._agent_id]

    @abstractmethod
    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        """Start an episode; returns the first observation and info."""

    @abstractmethod
    def env_step(self, action: str) -> StepOutcome:
        """Apply an action and return its outcome."""

    @abstractmethod
    def env_current_obs(self) -> str:
        """The current observation."""

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[str, Info]]:
        return {self._agent_id: self.env_reset(seed=seed)}

    def step(self, actions: dict[str, str]) -> dict[str, StepOutcome]:
        return {self._agent_id: self.env_step(actions.get(self._agent_id, ""))}

    def current_obs(self) -> dict[str, str]:
        return {self._agent_id: self.env_current_obs()}
