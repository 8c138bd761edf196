"""Tic-tac-toe: rules, perfect play, opponents, and environments for one or two agents."""

from ludic.envs.tictactoe.env import TicTacToeEnv, TwoPlayerTicTacToeEnv
from ludic.envs.tictactoe.rules import (
    EMPTY,
    Board,
    BoardText,
    GameText,
    MixedOpponent,
    MoveText,
    Opponent,
    PerfectOpponent,
    RandomOpponent,
    cell_name,
    legal_moves,
    optimal_moves,
    play,
    read_cell,
    to_move,
    value,
    winner,
)

__all__ = [
    "EMPTY",
    "Board",
    "BoardText",
    "GameText",
    "MixedOpponent",
    "MoveText",
    "Opponent",
    "PerfectOpponent",
    "RandomOpponent",
    "TicTacToeEnv",
    "TwoPlayerTicTacToeEnv",
    "cell_name",
    "legal_moves",
    "optimal_moves",
    "play",
    "read_cell",
    "to_move",
    "value",
    "winner",
]
