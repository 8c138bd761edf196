"""Tic-tac-toe for one agent against an opponent, and for two agents."""

from __future__ import annotations

from random import Random

from ludic.envs.env import LudicEnv
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
    to_move,
    value,
    winner,
)
from ludic.errors import ConfigError, RolloutError
from ludic.types import Info, StepOutcome


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
