"""Perfect play by exhaustive search: the earliest win, else a draw, else the latest loss."""

from __future__ import annotations

from functools import cache

from ludic.envs.tictactoe.rules import Board, legal_moves, play, winner


def value(board: Board) -> int:
    """The result of perfect play for the side to move: 1 a win, 0 a draw, -1 a loss."""
    score = _score(board)
    return (score > 0) - (score < 0)


@cache
def optimal_moves(board: Board) -> tuple[int, ...]:
    """All moves of perfect play, which prefers early wins and late losses. Empty after the end
    of the game."""
    scores = {cell: -_score(play(board, cell)) for cell in legal_moves(board)}
    return tuple(cell for cell, score in scores.items() if score == max(scores.values()))


@cache
def _score(board: Board) -> int:
    """For the side to move: 0 for a draw, else 1 + the number of empty cells at the end, positive
    for a win and negative for a loss."""
    if winner(board):
        return -1 - board.count(".")
    return max((-_score(play(board, cell)) for cell in legal_moves(board)), default=0)
