"""Tic-tac-toe for two agents, for example in self-play."""

from __future__ import annotations

from random import Random

from ludic.envs.env import LudicEnv
from ludic.envs.tictactoe.rules import (
    EMPTY,
    RULES,
    Board,
    BoardText,
    GameText,
    cell_name,
    legal_moves,
    play,
    read_cell,
    to_move,
    winner,
)
from ludic.errors import ConfigError, RolloutError
from ludic.types import Info, StepOutcome

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
        if not 0 <= random_moves <= 4:
            raise ConfigError(f"random_moves ({random_moves}) must be from 0 to 4; the fifth move may end a game")
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
            raise RolloutError(
                f"step() got actions of {sorted(actions)}; it is the turn of {self.active_agents or 'nobody'}, and reset() starts a game"
            )
        mover, cell = to_move(self.board), read_cell(actions[to_move(self.board)])
        other = MARKS[1 - MARKS.index(mover)]
        if cell is None or cell not in legal_moves(self.board):
            return self._finish({mover: "illegal", other: "forfeit"})
        self.board = play(self.board, cell)
        if legal_moves(self.board):
            return {
                other: StepOutcome(
                    self._observe(cell), 0.0, False, False, {"opponent_move": cell_name(cell), "board": self.board}
                )
            }
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
