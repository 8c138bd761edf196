"""How a game is shown to an agent: the whole board in words, or the opponent's move alone."""

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
        """The first observation; `opponent_move` is None where the agent begins."""

    def after(self, board: Board, mark: str, opponent_move: int | None) -> str:
        """What is seen after the agent's move and the opponent's; None where the game ended with
        the agent's."""


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
    """The opponent's move alone, as a digit: `:7>`, or `:.>` where there is none. The board has to
    be remembered.

    It costs three characters a turn. The first observation has the agent's mark before them:
    `O:7>`.
    """

    def opening(self, board: Board, mark: str, opponent_move: int | None) -> str:
        return f"{mark}{self.after(board, mark, opponent_move)}"

    def after(self, board: Board, mark: str, opponent_move: int | None) -> str:
        return f":{'.' if opponent_move is None else opponent_move + 1}>"
