"""The same names as `ludic.agents`."""

from ludic.agents import Agent

__all__ = ["Agent"]
