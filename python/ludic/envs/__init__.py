"""Environments: they return observations and rewards for actions. `adapters` has environments of
other libraries."""

from ludic.envs.dataset_qa_env import DatasetQAEnv, ParserFn, PromptBuilder, PromptEnv, Sample, VerifierFn
from ludic.envs.env import LudicEnv, SingleAgentEnv
from ludic.envs.key_value import KeyValueEnv
from ludic.envs.tictactoe import TicTacToeEnv, TwoPlayerTicTacToeEnv

__all__ = [
    "DatasetQAEnv",
    "KeyValueEnv",
    "LudicEnv",
    "ParserFn",
    "PromptBuilder",
    "PromptEnv",
    "Sample",
    "SingleAgentEnv",
    "TicTacToeEnv",
    "TwoPlayerTicTacToeEnv",
    "VerifierFn",
]
