"""Protocols: they play an episode with one or several agents and an environment, and return
rollouts."""

from ludic.interaction.base import InteractionProtocol
from ludic.interaction.info import merge_step_info
from ludic.interaction.multi_agent import MultiAgentProtocol
from ludic.interaction.single_agent import SingleAgentProtocol
from ludic.interaction.step_collector import TraceCollector

__all__ = ["InteractionProtocol", "MultiAgentProtocol", "SingleAgentProtocol", "TraceCollector", "merge_step_info"]
