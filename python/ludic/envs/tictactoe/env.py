"""Tic-tac-toe for one agent against an opponent."""

from __future__ import annotations

from random import Random

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.envs.tictactoe.rules import (
    EMPTY,
    RULES,
    Board,
    BoardText,
    GameText,
    Opponent,
    RandomOpponent,
    cell_name,
    legal_moves,
    optimal_moves,
    play,
    read_cell,
    value,
    winner,
)
from ludic.errors import RolloutError
from ludic.types import Info, StepOutcome


class TicTacToeEnv(SingleAgentEnv):
    """The agent names an empty cell and the opponent moves, until the game is over.

    A draw is **forced** if every move of the agent kept the value of perfect play: it missed no win
    and allowed none. Its reward may be higher than that of other draws. An illegal move ends the
    game with `illegal_reward`.

    With the same seed the opponent draws the same random numbers at its n-th move, regardless of
    the agent's moves, so the games of a group have the same luck. The global random state is
    neither read nor changed.

    A step's info: `agent_move` (A1 to C3, or the text if it is illegal), `gto_action` (a
    move of perfect play), `opponent_move` (or None), `board`, `illegal_move`; at the end `result`
    (win, draw, loss or illegal), `won`, `drawn` and `forced_draw`; `error` says what is wrong with
    an illegal move.

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

    @property
    def suggested_sysprompt(self) -> str | None:
        return self._system_prompt

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
        if self._result is not None:
            raise RolloutError(f"there is no game to move in ({self._result}); call reset() before the next step")
        best, cell = optimal_moves(self.board), read_cell(action)
        info: Info = {"agent_move": action, "gto_action": cell_name(best[0]), "opponent_move": None, "illegal_move": False}
        if cell is None or cell not in legal_moves(self.board):
            return self._refuse(action, cell, info)
        before = value(self.board)
        self.board = play(self.board, cell)
        self._perfect = self._perfect and before == -value(self.board)
        answer = None if self._is_over() else self._let_opponent_move()
        self._obs = self._text.after(self.board, self.mark, answer)
        info |= {
            "agent_move": cell_name(cell),
            "opponent_move": None if answer is None else cell_name(answer),
            "board": self.board,
        }
        return self._finish(info) if self._is_over() else StepOutcome(self._obs, 0.0, False, False, info)

    def env_current_obs(self) -> str:
        return self._obs

    def _let_opponent_move(self) -> int:
        number = 9 - self.board.count(".")
        cell = self._opponent.choose(self.board, Random(f"{self._seed} {number}"))
        self.board = play(self.board, cell)
        return cell

    def _is_over(self) -> bool:
        return not legal_moves(self.board)

    def _finish(self, info: Info) -> StepOutcome:
        won = winner(self.board)
        self._result = "draw" if won is None else "win" if won == self.mark else "loss"
        forced = self._result == "draw" and self._perfect
        info |= {"result": self._result, "forced_draw": forced, "won": self._result == "win", "drawn": self._result == "draw"}
        reward = self._forced_draw_reward if forced else self._rewards[self._result]
        return StepOutcome(self._obs, reward, truncated=False, terminated=True, info=info)

    def _refuse(self, action: str, cell: int | None, info: Info) -> StepOutcome:
        self._result = "illegal"
        what = f"{cell_name(cell)} is taken" if cell is not None else f"{action[:40]!r} names no cell"
        self._obs = f"Illegal move: {what}. The game is over."
        info |= {"illegal_move": True, "error": what, "board": self.board, "result": "illegal"}
        info |= {"forced_draw": False, "won": False, "drawn": False}
        return StepOutcome(self._obs, self._rewards["illegal"], truncated=False, terminated=True, info=info)
