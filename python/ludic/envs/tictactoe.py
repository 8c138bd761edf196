"""Tic-tac-toe: rules, perfect play, opponents, and environments for one or two agents.

A board is nine characters, row by row: `X`, `O`, or `.` for an empty cell. X moves first.

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

from ludic.envs.env import LudicEnv, SingleAgentEnv, check_step
from ludic.errors import DataError, RolloutError, check_value
from ludic.types import Info, StepOutcome

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
        check_value("perfect", self.perfect, "it is the share of perfect moves", least=0, most=1)

    def choose(self, board: Board, rng: Random) -> int:
        certain = self.perfect in (0.0, 1.0)
        perfect = self.perfect == 1.0 if certain else rng.random() < self.perfect
        return (PerfectOpponent() if perfect else RandomOpponent()).choose(board, rng)


RULES = (
    "You play tic-tac-toe. Cells are named A1 to C3: the row's letter, then the column's number. Three of your marks in a row, a "
    "column or a diagonal win. Answer each turn with the name of an empty cell between tags, such as <move>B2</move>."
)


@dataclass(frozen=True)
class BoardText:
    """The board as three rows of `X`, `O` and `.`, with their names."""

    show_opponent_move: bool = True
    """Say which move the opponent made last."""

    def opening(self, board: Board, mark: str, opponent_move: int | None) -> str:
        """The first observation; `opponent_move` is None if the agent starts."""
        return f"You are {mark}.\n{self.after(board, mark, opponent_move)}"

    def after(self, board: Board, mark: str, opponent_move: int | None) -> str:
        """The observation after the agent's and the opponent's move; `opponent_move` is None if the
        agent's move ended the game."""
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


GameText = BoardText | MoveText
"""The observations of one game, from the agent's side."""


class TicTacToeEnv(SingleAgentEnv):
    """The agent names an empty cell and the opponent moves, until the game is over.

    A draw is **forced** if every move of the agent kept the value of perfect play: it missed no win
    and allowed none. Its reward may be higher than the reward of other draws. An illegal move ends
    the game with `illegal_reward`.

    With the same seed the opponent draws the same random numbers at its n-th move, regardless of
    the agent's moves, so the games of a group have the same luck. The global random state is
    neither read nor changed.

    A step's info: `agent_move` (A1 to C3, or the text if it is illegal), `gto_action` (a move of
    perfect play), `opponent_move` (or None), `board`, `illegal_move`; at the end `result` (win,
    draw, loss or illegal), `won`, `drawn` and `forced_draw`; `error` says why a move is illegal.

    >>> env = TicTacToeEnv(opponent=PerfectOpponent())
    >>> obs, info = env.env_reset(seed=0)
    >>> outcome = env.env_step("B2")
    """

    def __init__(
        self,
        *,
        agent_starts: bool = True,
        show_opponent_move: bool = True,
        opponent: Opponent | None = None,
        text: GameText | None = None,
        win_reward: float = 1.0,
        forced_draw_reward: float = 1.0,
        draw_reward: float = 0.5,
        loss_reward: float = 0.0,
        illegal_reward: float = -1.0,
        system_prompt: str | None = RULES,
    ) -> None:
        super().__init__()
        self.mark = "X" if agent_starts else "O"
        self.board: Board = EMPTY
        self._opponent: Opponent = RandomOpponent() if opponent is None else opponent
        self._text: GameText = BoardText(show_opponent_move) if text is None else text
        self._rewards = {"win": win_reward, "draw": draw_reward, "loss": loss_reward, "illegal": illegal_reward}
        self._forced_draw_reward = forced_draw_reward
        self._system_prompt = system_prompt
        self._seed: int | None = None
        self._obs = ""
        self._perfect = True
        self._result: str | None = "unopened"

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        """An empty board, or one with the opponent's first move. Without a seed the opponent draws
        from a random state."""
        self.board, self._perfect, self._result = EMPTY, True, None
        self._seed = Random().getrandbits(64) if seed is None else seed
        first = None if self.mark == "X" else self._let_opponent_move()
        self._obs = self._text.opening(self.board, self.mark, first)
        return self._obs, {"mark": self.mark, "opponent_move": None if first is None else cell_name(first), "board": self.board}

    def env_step(self, action: str) -> StepOutcome:
        """Raises RolloutError before the start and after the end of the game."""
        check_step(self._result is None, f"there is no game to move in ({self._result})")
        best, cell = optimal_moves(self.board), read_cell(action)
        info: Info = {"agent_move": action, "gto_action": cell_name(best[0]), "opponent_move": None, "illegal_move": False}
        if cell is None or cell not in legal_moves(self.board):
            return self._refuse(action, cell, info)
        before = value(self.board)
        self.board = play(self.board, cell)
        self._perfect = self._perfect and before == -value(self.board)
        answer = self._let_opponent_move() if legal_moves(self.board) else None
        self._obs = self._text.after(self.board, self.mark, answer)
        info |= {
            "agent_move": cell_name(cell),
            "opponent_move": None if answer is None else cell_name(answer),
            "board": self.board,
        }
        return StepOutcome(self._obs, 0.0, False, False, info) if legal_moves(self.board) else self._finish(info)

    def env_current_obs(self) -> str:
        return self._obs

    def _let_opponent_move(self) -> int:
        cell = self._opponent.choose(self.board, Random(f"{self._seed} {9 - self.board.count('.')}"))
        self.board = play(self.board, cell)
        return cell

    def _finish(self, info: Info) -> StepOutcome:
        won = winner(self.board)
        self._result = "draw" if won is None else "win" if won == self.mark else "loss"
        forced = self._result == "draw" and self._perfect
        info |= {**_result_info(self._result), "forced_draw": forced}
        reward = self._forced_draw_reward if forced else self._rewards[self._result]
        return StepOutcome(self._obs, reward, truncated=False, terminated=True, info=info)

    def _refuse(self, action: str, cell: int | None, info: Info) -> StepOutcome:
        self._result = "illegal"
        what = f"{cell_name(cell)} is taken" if cell is not None else f"{action[:40]!r} names no cell"
        self._obs = f"Illegal move: {what}. The game is over."
        info |= {**_result_info("illegal"), "illegal_move": True, "error": what, "board": self.board, "forced_draw": False}
        return StepOutcome(self._obs, self._rewards["illegal"], truncated=False, terminated=True, info=info)


MARKS = ("X", "O")


class TwoPlayerTicTacToeEnv(LudicEnv[str, str, str]):
    """The agents are `X` and `O`. Each sees the other's move before its own, and both see how the
    game ended.

    The first `random_moves` moves of a game are drawn from its seed, so all games of a group have
    the same opening; if their number is odd, O makes the first choice. A text that shows only the
    last move, as `MoveText` does, hides the random moves before it: with more than one of them a
    player cannot know the board.

    An illegal move ends the game: its player earns `illegal_reward`, the other `draw_reward`.

    The info of a player's last step: `result` (win, draw, loss, illegal, or forfeit after an
    illegal move of the other), `won`, `drawn`, `illegal_move`, `board`.

    >>> env = TwoPlayerTicTacToeEnv()
    >>> obs, info = env.reset(seed=0)["X"]
    >>> outcomes = env.step({"X": "B2"})
    >>> env.active_agents
    ['O']
    """

    def __init__(
        self,
        *,
        text: GameText | None = None,
        random_moves: int = 0,
        win_reward: float = 1.0,
        draw_reward: float = 0.5,
        loss_reward: float = 0.0,
        illegal_reward: float = -1.0,
        system_prompt: str | None = RULES,
    ) -> None:
        check_value("random_moves", random_moves, "the fifth move may end a game", least=0, most=4)
        self.board: Board = EMPTY
        self._text: GameText = BoardText() if text is None else text
        self._random_moves = random_moves
        self._rewards = {"win": win_reward, "draw": draw_reward, "loss": loss_reward, "illegal": illegal_reward}
        self._rewards["forfeit"] = draw_reward
        self._system_prompt = system_prompt
        self._opened: set[str] = set()
        self._playing = False

    @property
    def agent_ids(self) -> list[str]:
        return list(MARKS)

    @property
    def active_agents(self) -> list[str]:
        return [to_move(self.board)] if self._playing else []

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[str, Info]]:
        """Start a game. Returns the first observation of the agent that moves first; the other gets
        its first observation after that move. Without a seed the opening is random."""
        self.board, self._opened, self._playing = EMPTY, set(), True
        rng, last = Random(seed), None
        for _ in range(self._random_moves):
            last = rng.choice(legal_moves(self.board))
            self.board = play(self.board, last)
        return {to_move(self.board): (self._observe(last), {"board": self.board})}

    def step(self, actions: dict[str, str]) -> dict[str, StepOutcome]:
        """Play the move of the active agent. Raises RolloutError for actions of others, and
        outside a game."""
        if actions.keys() != set(self.active_agents):
            raise RolloutError(f"actions of {sorted(actions)}; it is the turn of {self.active_agents or 'nobody: call reset()'}")
        mover, cell = to_move(self.board), read_cell(actions[to_move(self.board)])
        other = MARKS[1 - MARKS.index(mover)]
        if cell is None or cell not in legal_moves(self.board):
            return self._finish({mover: "illegal", other: "forfeit"})
        self.board = play(self.board, cell)
        if legal_moves(self.board):
            info: Info = {"opponent_move": cell_name(cell), "board": self.board}
            return {other: StepOutcome(self._observe(cell), 0.0, False, False, info)}
        if winner(self.board) is None:
            return self._finish({mover: "draw", other: "draw"})
        return self._finish({mover: "win", other: "loss"})

    def _observe(self, last: int | None) -> str:
        """The observation of the player whose turn it is."""
        mark = to_move(self.board)
        show = self._text.after if mark in self._opened else self._text.opening
        self._opened.add(mark)
        return show(self.board, mark, last)

    def _finish(self, results: dict[str, str]) -> dict[str, StepOutcome]:
        self._playing, outcomes = False, {}
        for mark, result in results.items():
            info: Info = {**_result_info(result), "illegal_move": result == "illegal", "board": self.board}
            obs, reward = f"The game is over: {result}.", self._rewards[result]
            outcomes[mark] = StepOutcome(obs, reward, truncated=False, terminated=True, info=info)
        return outcomes


def _result_info(result: str) -> Info:
    return {"result": result, "won": result == "win", "drawn": result == "draw"}
