"""What a built-in task offers: problems to train on, problems held out, an imperfect teacher, an
environment that verifies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol, TypedDict

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import ConfigError


class Problem(TypedDict):
    """One question with its only right answer. Example: `{"id": "529140", "question": "529140>",
    "answer": "012459"}`."""

    id: str
    """Unique in the task; two problems with one id are the same problem."""
    question: str
    """The prompt, verbatim."""
    answer: str
    """What the verifier compares with."""


class Task(Protocol):
    """A source of problems and the environment that scores them. Stateless: every draw comes
    from the caller's `rng`."""

    @property
    def max_new_tokens(self) -> int:
        """Enough bytes for every answer of the teacher and the end token, with a little to
        spare."""

    @property
    def reward_sees(self) -> str:
        """What the reward looks at, in words, for the report."""

    @property
    def facts(self) -> Mapping[str, str]:
        """Booleans of the step's info that are logged beside the reward and earn nothing: key to
        meaning."""

    def draw(self, rng: Random) -> Problem:
        """A problem to train on; never one that is held out."""

    def heldout(self) -> Sequence[Problem]:
        """The problems kept for evaluation: the same in every run, whatever its seed."""

    def demonstrate(self, problem: Problem, rng: Random) -> str:
        """An answer of the imperfect teacher."""

    def make_env(self, problem: Problem) -> SingleAgentEnv:
        """One episode on `problem`: one answer, reward 1 or 0."""


def check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name} ({value}) must be between 0 and 1; it is a share of the demonstrations")
