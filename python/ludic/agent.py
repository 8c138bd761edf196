"""The same names as `ludic.agents`."""

from ludic.agents import Agent, ReActAgent, ToolAgent

__all__ = ["Agent", "ReActAgent", "ToolAgent"]
