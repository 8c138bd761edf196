"""Protocols: they play an episode with one or several agents and an environment, and return
rollouts."""

from ludic.interaction.multi_agent import MultiAgentProtocol, TraceCollector
from ludic.interaction.single_agent import InteractionProtocol, SingleAgentProtocol, merge_step_info

__all__ = ["InteractionProtocol", "MultiAgentProtocol", "SingleAgentProtocol", "TraceCollector", "merge_step_info"]
