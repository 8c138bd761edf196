"""Opponents: stateless policies from a board to a move, with the caller's random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Protocol

from ludic.envs.tictactoe.perfect_play import optimal_moves
from ludic.envs.tictactoe.rules import Board, legal_moves
from ludic.errors import ConfigError


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
