"""Environments: what agents act in."""

from ludic.envs.dataset_qa_env import DatasetQAEnv, ParserFn, PromptBuilder, Sample, VerifierFn
from ludic.envs.env import LudicEnv
from ludic.envs.prompt_env import PromptEnv
from ludic.envs.single_agent_env import SingleAgentEnv

__all__ = ["DatasetQAEnv", "LudicEnv", "ParserFn", "PromptBuilder", "PromptEnv", "Sample", "SingleAgentEnv", "VerifierFn"]
