"""Agents act in environments."""

from ludic.agents.base_agent import Agent
from ludic.agents.react_agent import ReActAgent
from ludic.agents.tool_agent import ToolAgent

__all__ = ["Agent", "ReActAgent", "ToolAgent"]
