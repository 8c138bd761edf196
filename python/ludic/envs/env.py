"""The interfaces of environments: for any number of agents, and for one agent without dictionaries
by agent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from ludic.errors import RolloutError
from ludic.types import Info, StepOutcome

AgentID = TypeVar("AgentID", bound=Hashable)
ObsType = TypeVar("ObsType")
ActionType = TypeVar("ActionType")


class LudicEnv(ABC, Generic[AgentID, ObsType, ActionType]):
    """Agents act simultaneously or in turn; the next `step` takes the actions of `active_agents`.

    An environment with resources may have a method `close()`, which the engine calls after the
    episode.
    """

    _system_prompt: str | None = None

    @property
    @abstractmethod
    def agent_ids(self) -> list[AgentID]:
        """All agents."""

    @property
    @abstractmethod
    def active_agents(self) -> list[AgentID]:
        """The agents that act in the next step."""

    @property
    def suggested_sysprompt(self) -> str | None:
        """A system prompt for agents that have none."""
        return self._system_prompt

    @abstractmethod
    def reset(self, *, seed: int | None = None) -> dict[AgentID, tuple[ObsType, Info]]:
        """Start an episode; returns the first observation and info of each agent."""

    @abstractmethod
    def step(self, actions: dict[AgentID, ActionType]) -> dict[AgentID, StepOutcome]:
        """Apply the actions; returns the outcome of each affected agent."""

    def current_obs(self) -> dict[AgentID, ObsType]:
        """The current observation of each agent."""
        raise NotImplementedError(f"{type(self).__name__} does not offer current_obs()")


class SingleAgentEnv(LudicEnv[str, Any, str]):
    """Implement `env_reset`, `env_step` and `env_current_obs`. They may be coroutine functions.

    An observation is text, an image (of Pillow, or an array [H, W, 3] of uint8), or a list of
    texts, images and parts of a message.
    """

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
    def env_reset(self, *, seed: int | None = None) -> tuple[Any, Info]:
        """Start an episode; returns the first observation and info."""

    @abstractmethod
    def env_step(self, action: str) -> StepOutcome:
        """Apply an action and return its outcome."""

    @abstractmethod
    def env_current_obs(self) -> Any:
        """The current observation."""

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[Any, Info]]:
        return {self._agent_id: self.env_reset(seed=seed)}

    def step(self, actions: dict[str, str]) -> dict[str, StepOutcome]:
        return {self._agent_id: self.env_step(actions.get(self._agent_id, ""))}

    def current_obs(self) -> dict[str, Any]:
        return {self._agent_id: self.env_current_obs()}


def check_step(is_running: bool, problem: str) -> None:
    """Raise RolloutError, which begins with the `problem`, unless an episode is running."""
    if not is_running:
        raise RolloutError(f"{problem}; call reset() before the next step")
