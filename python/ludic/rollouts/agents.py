"""The agents of `ludic.agents`, as `rollouts.agents`."""

from ludic.agents import Agent, ReActAgent, ToolAgent

__all__ = ["Agent", "ReActAgent", "ToolAgent"]
