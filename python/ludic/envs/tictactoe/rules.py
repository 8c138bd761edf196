"""The rules. A board is nine characters, row by row: `X`, `O`, or `.` for an empty cell. X moves
first.

Cells are numbered 0 to 8. They are written A1 to C3 (the row's letter, then the column's number) or
1 to 9.
"""

from __future__ import annotations

from functools import cache

from ludic.errors import DataError

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
