"""Environments: they return observations and rewards for actions. `adapters` has environments of
other libraries."""

from ludic.envs.dataset_qa_env import (
    DatasetQAEnv as DatasetQAEnv,
    ParserFn as ParserFn,
    PromptBuilder as PromptBuilder,
    PromptEnv as PromptEnv,
    Sample as Sample,
    VerifierFn as VerifierFn,
)
from ludic.envs.env import LudicEnv as LudicEnv, SingleAgentEnv as SingleAgentEnv
from ludic.envs.key_value import KeyValueEnv as KeyValueEnv
from ludic.envs.tictactoe import TicTacToeEnv as TicTacToeEnv, TwoPlayerTicTacToeEnv as TwoPlayerTicTacToeEnv
