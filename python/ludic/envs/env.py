"""An environment for any number of agents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Generic, TypeVar

from ludic.types import Info, StepOutcome

AgentID = TypeVar("AgentID", bound=Hashable)
ObsType = TypeVar("ObsType")
ActionType = TypeVar("ActionType")


class LudicEnv(ABC, Generic[AgentID, ObsType, ActionType]):
    """Agents act together or in turn; `active_agents` says whose action the next `step` takes.

    An environment that holds resources may offer `close()`, which the engine calls when the episode
    is over.
    """

    @property
    @abstractmethod
    def agent_ids(self) -> list[AgentID]:
        """All agents."""

    @property
    @abstractmethod
    def active_agents(self) -> list[AgentID]:
        """The agents whose action is due."""

    @property
    def suggested_sysprompt(self) -> str | None:
        """A system prompt for agents that have none."""
        return None

    @abstractmethod
    def reset(self, *, seed: int | None = None) -> dict[AgentID, tuple[ObsType, Info]]:
        """Begin an episode: first observation and info of each agent."""

    @abstractmethod
    def step(self, actions: dict[AgentID, ActionType]) -> dict[AgentID, StepOutcome]:
        """Apply the actions; the outcome of each agent concerned."""

    def current_obs(self) -> dict[AgentID, ObsType]:
        """What each agent sees now."""
        raise NotImplementedError(f"{type(self).__name__} does not offer current_obs()")
