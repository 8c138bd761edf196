"""Tic-tac-toe for two agents, for example in self-play."""

from __future__ import annotations

from random import Random

from ludic.envs.env import LudicEnv
from ludic.envs.tictactoe.rules import EMPTY, Board, cell_name, legal_moves, play, read_cell, to_move, winner
from ludic.envs.tictactoe.text import RULES, BoardText, GameText
from ludic.errors import ConfigError, RolloutError
from ludic.types import Info, StepOutcome

MARKS = ("X", "O")


class TwoPlayerTicTacToeEnv(LudicEnv[str, str, str]):
    """The agents are `X` and `O`; each sees the other's move when its own is due, and how the game
    ended, whoever moved last.

    The first `random_moves` moves of a game are drawn from its seed, so that the members of a group
    meet the same opening; with an odd number O is the first to choose. A text that shows the last
    move alone, as `MoveText` does, leaves out what was drawn before it: with more than one such
    move a player cannot know the board.

    A move that is not legal ends the game: its player earns `illegal_reward`, the other
    `draw_reward`.

    The info of a player's last step: `result` (win, draw, loss, illegal, or forfeit where the
    other's move was not legal), `won`, `drawn`, `illegal_move`, `board`.

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
        if not 0 <= random_moves <= 4:
            raise ConfigError(f"random_moves ({random_moves}) must be from 0 to 4; from the fifth move on a game may be over")
        self.board: Board = EMPTY
        self._text: GameText = BoardText() if text is None else text
        self._random_moves = random_moves
        self._rewards = {
            "win": win_reward,
            "draw": draw_reward,
            "loss": loss_reward,
            "illegal": illegal_reward,
            "forfeit": draw_reward,
        }
        self._system_prompt = system_prompt
        self._opened: set[str] = set()
        self._playing = False

    @property
    def suggested_sysprompt(self) -> str | None:
        return self._system_prompt

    @property
    def agent_ids(self) -> list[str]:
        return list(MARKS)

    @property
    def active_agents(self) -> list[str]:
        return [to_move(self.board)] if self._playing else []

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[str, Info]]:
        """The first observation of the agent that begins; the other gets its own after that
        move. Without a seed the opening is fresh."""
        self.board, self._opened, self._playing = EMPTY, set(), True
        rng, last = Random(seed), None
        for _ in range(self._random_moves):
            last = rng.choice(legal_moves(self.board))
            self.board = play(self.board, last)
        return {to_move(self.board): (self._shown(last), {"board": self.board})}

    def step(self, actions: dict[str, str]) -> dict[str, StepOutcome]:
        """Play the move of the agent that is due. Raises RolloutError for any other, and where
        there is no game."""
        if actions.keys() != set(self.active_agents):
            raise RolloutError(f"actions of {sorted(actions)} where {self.active_agents or 'none'} is due; reset() begins a game")
        mover, cell = to_move(self.board), read_cell(actions[to_move(self.board)])
        other = MARKS[1 - MARKS.index(mover)]
        if cell is None or cell not in legal_moves(self.board):
            return self._finish({mover: "illegal", other: "forfeit"})
        self.board = play(self.board, cell)
        if legal_moves(self.board):
            return {
                other: StepOutcome(self._shown(cell), 0.0, False, False, {"opponent_move": cell_name(cell), "board": self.board})
            }
        drawn = winner(self.board) is None
        return self._finish({mover: "draw", other: "draw"} if drawn else {mover: "win", other: "loss"})

    def _shown(self, last: int | None) -> str:
        """What the player who is due sees."""
        mark = to_move(self.board)
        show = self._text.after if mark in self._opened else self._text.opening
        self._opened.add(mark)
        return show(self.board, mark, last)

    def _finish(self, results: dict[str, str]) -> dict[str, StepOutcome]:
        self._playing = False
        return {
            mark: StepOutcome(
                f"The game is over: {result}.",
                self._rewards[result],
                truncated=False,
                terminated=True,
                info={
                    "result": result,
                    "won": result == "win",
                    "drawn": result == "draw",
                    "illegal_move": result == "illegal",
                    "board": self.board,
                },
            )
            for mark, result in results.items()
        }
