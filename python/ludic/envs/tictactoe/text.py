"""Text observations of a game: the whole board, or only the opponent's move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ludic.envs.tictactoe.rules import Board, cell_name

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
