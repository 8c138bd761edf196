"""The rules. A board is nine characters, row by row: `X`, `O`, or `.` for an empty cell. X moves
first.

Cells are numbered 0 to 8. They are written A1 to C3 (the row's letter, then the column's number) or
1 to 9.

Perfect play is found by exhaustive search: the earliest win, else a draw, else the latest loss.
Opponents are stateless policies from a board to a move, with the caller's random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Protocol

from ludic.errors import ConfigError, DataError

Board = str
"""`"X...O...."`: X in the upper left corner, O in the middle."""
EMPTY: Board = "." * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def to_move(board: Board) -> str:
    """Whose turn it is; X has as many marks as O, or one more."""
    return "X" if board.count("X") == board.count("O") else "O"


@cache
def winner(board: Board) -> str | None:
    """The mark that has three in a line, or None."""
    for a, b, c in LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return None


@cache
def legal_moves(board: Board) -> tuple[int, ...]:
    """The empty cells, none once the game is won."""
    return () if winner(board) else tuple(cell for cell in range(9) if board[cell] == ".")


def play(board: Board, cell: int) -> Board:
    """The board after the next mark is put into `cell`. Raises DataError for an illegal move."""
    if cell not in legal_moves(board):
        raise DataError(f"cell {cell} of {board} cannot be played; legal moves are {list(legal_moves(board))}")
    return board[:cell] + to_move(board) + board[cell + 1 :]


def cell_name(cell: int) -> str:
    """`A1` for 0, `C3` for 8."""
    return "ABC"[cell // 3] + "123"[cell % 3]


_CELLS = {name: cell for cell in range(9) for name in (cell_name(cell), str(cell + 1))}


def read_cell(text: str) -> int | None:
    """The cell that `text` names, A1 to C3 or 1 to 9 in any case and with white space around it,
    or None."""
    return _CELLS.get(text.strip().upper())


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


class Opponent(Protocol):
    """Chooses a move for the side to move."""

    def choose(self, board: Board, rng: Random) -> int:
        """A legal move; the board has one."""


@dataclass(frozen=True)
class RandomOpponent:
    """Every legal move is equally likely."""

    def choose(self, board: Board, rng: Random) -> int:
        return rng.choice(legal_moves(board))


@dataclass(frozen=True)
class PerfectOpponent:
    """Every move of perfect play is equally likely. It never loses."""

    def choose(self, board: Board, rng: Random) -> int:
        return rng.choice(optimal_moves(board))


@dataclass(frozen=True)
class MixedOpponent:
    """Each move is perfect with probability `perfect`, otherwise random. At 0 and 1 it plays the
    same moves as the random or the perfect opponent."""

    perfect: float = 0.4

    def __post_init__(self) -> None:
        if not 0.0 <= self.perfect <= 1.0:
            raise ConfigError(f"perfect ({self.perfect}) must be between 0 and 1; it is the share of perfect moves")

    def choose(self, board: Board, rng: Random) -> int:
        certain = self.perfect in (0.0, 1.0)
        perfect = self.perfect == 1.0 if certain else rng.random() < self.perfect
        return (PerfectOpponent() if perfect else RandomOpponent()).choose(board, rng)


RULES = (
    "You play tic-tac-toe. Cells are named A1 to C3: the row's letter, then the column's number. Three of your marks in a row, a "
    "column or a diagonal win. Answer each turn with the name of an empty cell between tags, such as <move>B2</move>."
)


class GameText(Protocol):
    """The observations of one game, from the agent's side."""

    def opening(self, board: Board, mark: str, opponent_move: int | None) -> str:
        """The first observation; `opponent_move` is None if the agent starts."""

    def after(self, board: Board, mark: str, opponent_move: int | None) -> str:
        """The observation after the agent's and the opponent's move; `opponent_move` is None if the
        agent's move ended the game."""


@dataclass(frozen=True)
class BoardText:
    """The board as three rows of `X`, `O` and `.`, with their names."""

    show_opponent_move: bool = True
    """Say which move the opponent made last."""

    def opening(self, board: Board, mark: str, opponent_move: int | None) -> str:
        return f"You are {mark}.\n{self.after(board, mark, opponent_move)}"

    def after(self, board: Board, mark: str, opponent_move: int | None) -> str:
        rows = [f"{name} {' '.join(board[start : start + 3])}" for name, start in zip("ABC", (0, 3, 6), strict=True)]
        moved: list[str] = []
        if opponent_move is not None and self.show_opponent_move:
            moved.append(f"Your opponent played {cell_name(opponent_move)}.")
        return "\n".join([*moved, "  1 2 3", *rows])


@dataclass(frozen=True)
class MoveText:
    """Only the opponent's move, as a digit: `:7>`, or `:.>` without a move. The agent must remember
    the board.

    A turn is three characters. The first observation starts with the agent's mark: `O:7>`.
    """

    def opening(self, board: Board, mark: str, opponent_move: int | None) -> str:
        return f"{mark}{self.after(board, mark, opponent_move)}"

    def after(self, board: Board, mark: str, opponent_move: int | None) -> str:
        return f":{'.' if opponent_move is None else opponent_move + 1}>"
