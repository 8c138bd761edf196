"""Tic-tac-toe as a task: trained against an opponent that mixes perfect and random moves, measured
against both kinds.

The warm-up teacher plays a perfect move half of the time, a random one nearly as often, and
sometimes names a taken cell, which ends its game. Reinforcement learning selects the good moves.
Nothing is held out: the game has few positions, and evaluation games differ from training games in
the opponent and its random moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from ludic.envs.tictactoe import (
    EMPTY,
    RULES,
    BoardText,
    MixedOpponent,
    MoveText,
    Opponent,
    PerfectOpponent,
    RandomOpponent,
    TicTacToeEnv,
    cell_name,
    legal_moves,
    optimal_moves,
)
from ludic.errors import check_value
from ludic.parsers import Parser, xml_tag_parser
from ludic.tasks.episodic import Episode, EpisodicTask, Played, Shown, Turn, share, transcript, verbatim
from ludic.types import Observation, Rollout

FORMATS = ("moves", "chat")
_GAMES = 1000  # of each suite, half of them with the agent as X


@dataclass(frozen=True)
class TicTacToe(EpisodicTask):
    """Win 1, draw 0.5, loss 0; an illegal move -1, and it ends the game."""

    opponent_perfect: float = 0.4
    """Share of the opponent's moves in training that are perfect; the rest are random."""
    as_o: float = 2 / 3
    """Share of training games in which the agent moves second, which is harder."""
    teacher_perfect: float = 0.5
    """Share of the teacher's moves that are perfect."""
    teacher_illegal: float = 0.03
    """Share of the teacher's moves that name a taken cell."""
    format: str = "moves"
    """`moves`: the observation is the opponent's move as a digit, the action is a digit. `chat`:
    rules, board, and moves between tags."""
    draw_reward: float = 0.5
    forced_draw_reward: float = 0.5
    """Reward of a draw in which the agent made no mistake."""

    def __post_init__(self) -> None:
        check_value("teacher_perfect + teacher_illegal", self.teacher_perfect + self.teacher_illegal, least=0, most=1)
        for name in ("teacher_illegal", "as_o"):
            check_value(name, getattr(self, name), least=0, most=1)
        MixedOpponent(self.opponent_perfect)
        check_value("format", self.format, choices=FORMATS)

    max_turns = 5  # X makes five moves on a full board
    cut_off_reward = -1.0
    reward_sees = "how the game ends, and an illegal move, which ends it; never whether a move was good"
    facts: ClassVar[Mapping[str, str]] = {
        "won": "games won",
        "drawn": "games drawn",
        "illegal_move": "games that an illegal move ended",
    }
    rates: ClassVar[Mapping[str, str]] = {
        "not_lost": "won or drawn against a random opponent",
        "perfect_drawn": "drawn against a perfect opponent",
        "legal_moves": "moves that are legal, against either",
        "won": "won against a random opponent",
        "drawn": "drawn against a random opponent",
        "lost": "lost against a random opponent",
        "not_lost_as_x": "won or drawn as X, against a random opponent",
        "not_lost_as_o": "won or drawn as O, against a random opponent",
        "perfect_drawn_as_x": "drawn as X, against a perfect opponent",
        "perfect_drawn_as_o": "drawn as O, against a perfect opponent",
    }

    @property
    def max_new_tokens(self) -> int:
        return 4 if self.format == "moves" else 32

    @property
    def system_prompt(self) -> str | None:
        return None if self.format == "moves" else RULES

    @property
    def parser(self) -> Parser:
        return verbatim if self.format == "moves" else xml_tag_parser("move", success_reward=0.0, error_reward=-1.0)

    @property
    def success_reward(self) -> float:
        return min(self.draw_reward, self.forced_draw_reward)

    def draw(self, rng: Random) -> Episode:
        return _game("O" if rng.random() < self.as_o else "X", "mixed")

    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]]:
        return [self._demonstrate(rng) for _ in range(count)]

    def make_env(self, episode: Episode) -> TicTacToeEnv:
        opponents: dict[str, Opponent] = {
            "random": RandomOpponent(),
            "perfect": PerfectOpponent(),
            "mixed": MixedOpponent(self.opponent_perfect),
        }
        return TicTacToeEnv(
            agent_starts=episode["mark"] == "X",
            opponent=opponents[episode["opponent"]],
            text=MoveText() if self.format == "moves" else BoardText(),
            draw_reward=self.draw_reward,
            forced_draw_reward=self.forced_draw_reward,
            system_prompt=self.system_prompt,
        )

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        return {name: [_game("XO"[i % 2], name) for i in range(_GAMES)] for name in ("random", "perfect")}

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        measured = _results(played["random"]) | {f"perfect_{name}": rate for name, rate in _results(played["perfect"]).items()}
        steps = [step for games in played.values() for _, game in games for step in game.steps]
        measured["legal_moves"] = share(step.info.get("illegal_move") is False for step in steps)
        return {name: measured[name] for name in self.rates}

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        result = _result(rollout)
        return Shown(
            f"{episode['mark']} against a {episode['opponent']} opponent", f"{result}: {transcript(rollout)}", "win or draw"
        )

    def _demonstrate(self, rng: Random) -> list[Turn]:
        """A game of the teacher, as X or as O, against a random opponent."""
        env = self.make_env(_game(rng.choice("XO"), "random"))
        observation: Observation
        observation, _ = env.env_reset(seed=rng.getrandbits(32))
        turns: list[Turn] = []
        over = False
        while not over:
            cell = self._teacher_move(env.board, rng)
            turns.append(Turn(observation, self._format_action(cell)))
            outcome = env.env_step(str(cell + 1))
            observation, over = outcome.obs, outcome.terminated
        return turns

    def _teacher_move(self, board: str, rng: Random) -> int:
        drawn = rng.random()
        if drawn < self.teacher_perfect:
            return rng.choice(optimal_moves(board))
        if drawn < self.teacher_perfect + self.teacher_illegal and board != EMPTY:
            return rng.choice([cell for cell in range(9) if board[cell] != "."])
        return rng.choice(legal_moves(board))

    def _format_action(self, cell: int) -> str:
        return str(cell + 1) if self.format == "moves" else f"<move>{cell_name(cell)}</move>"


def _game(mark: str, opponent: str) -> Episode:
    return {"id": f"{mark} against {opponent}", "mark": mark, "opponent": opponent}


def _results(games: Sequence[Played]) -> dict[str, float]:
    """Shares of won, drawn, lost and not lost games: overall, as X and as O."""
    rates = {}
    for suffix, mark in (("", None), ("_as_x", "X"), ("_as_o", "O")):
        results = [_result(rollout) for episode, rollout in games if mark in (None, episode["mark"])]
        for name, counted in {"won": {"win"}, "drawn": {"draw"}, "lost": {"loss"}, "not_lost": {"win", "draw"}}.items():
            rates[f"{name}{suffix}"] = share(result in counted for result in results)
    return rates


def _result(rollout: Rollout) -> str:
    """The result of the game. Text that cannot be parsed or was cut off is an illegal move."""
    return str(rollout.steps[-1].info.get("result", "illegal"))
