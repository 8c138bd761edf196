"""Tic-tac-toe: rules, perfect play, opponents, and environments for one or two agents."""

from ludic.envs.tictactoe.env import TicTacToeEnv
from ludic.envs.tictactoe.opponents import MixedOpponent, Opponent, PerfectOpponent, RandomOpponent
from ludic.envs.tictactoe.perfect_play import optimal_moves, value
from ludic.envs.tictactoe.rules import EMPTY, Board, cell_name, legal_moves, play, read_cell, to_move, winner
from ludic.envs.tictactoe.text import BoardText, GameText, MoveText
from ludic.envs.tictactoe.two_players import TwoPlayerTicTacToeEnv

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
