"""Protocols: they play an episode with one or several agents and an environment, and return
rollouts."""

from ludic.interaction.base import InteractionProtocol, merge_step_info
from ludic.interaction.multi_agent import MultiAgentProtocol, TraceCollector
from ludic.interaction.single_agent import SingleAgentProtocol

__all__ = ["InteractionProtocol", "MultiAgentProtocol", "SingleAgentProtocol", "TraceCollector", "merge_step_info"]
