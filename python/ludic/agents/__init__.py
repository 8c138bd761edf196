"""Agents: what acts in an environment."""

from ludic.agents.base_agent import Agent

__all__ = ["Agent"]
