"""Tic-tac-toe: the rules, perfect play, opponents as plain policies, and an environment in which one agent plays against one."""

from ludic.envs.tictactoe.env import TicTacToeEnv
from ludic.envs.tictactoe.opponents import MixedOpponent, Opponent, PerfectOpponent, RandomOpponent
from ludic.envs.tictactoe.perfect_play import optimal_moves, value
from ludic.envs.tictactoe.rules import EMPTY, Board, cell_name, legal_moves, play, read_cell, to_move, winner
from ludic.envs.tictactoe.text import BoardText, GameText, MoveText

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
    "cell_name",
    "legal_moves",
    "optimal_moves",
    "play",
    "read_cell",
    "to_move",
    "value",
    "winner",
]
