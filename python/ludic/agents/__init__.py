"""Agents: a model behind a chat client, with a context and a parser, that turns observations into
actions. `ToolAgent` and `ReActAgent` call tools first."""

from ludic.agents.base_agent import Agent as Agent
from ludic.agents.tool_agent import ReActAgent as ReActAgent, ToolAgent as ToolAgent
