"""The interface of a task of one turn: problems to train on, held-out problems, an imperfect
teacher, and an environment that verifies answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, Protocol, TypedDict

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import ConfigError
from ludic.training.types import RolloutScorer
from ludic.types import Rollout


class Problem(TypedDict):
    """One question with its only right answer. Example: `{"id": "529140", "question": "529140>",
    "answer": "012459"}`."""

    id: str
    """Unique in the task; two problems with one id are the same problem."""
    question: str
    """The prompt, verbatim."""
    answer: str
    """The verifier's reference."""


class Task(Protocol):
    """A source of problems and the environment that scores the answers. Stateless: every draw
    comes from the caller's `rng`.

    A task may also have the members of `TaskDefaults`.
    """

    @property
    def max_new_tokens(self) -> int:
        """Enough tokens for every answer of the teacher and the end token, with a small margin."""

    @property
    def reward_sees(self) -> str:
        """What the reward depends on, in words, for the report."""

    @property
    def facts(self) -> Mapping[str, str]:
        """Booleans of the step's info to log beside the reward, which does not depend on them:
        key to meaning."""

    def draw(self, rng: Random) -> Problem:
        """A problem to train on; never a held-out one."""

    def heldout(self) -> Sequence[Problem]:
        """The problems for evaluation: the same in every run, for any seed."""

    def demonstrate(self, problem: Problem, rng: Random) -> str:
        """An answer of the imperfect teacher."""

    def make_env(self, problem: Problem) -> SingleAgentEnv:
        """The environment of one episode: one answer, reward 1 or 0."""


class ProblemList(Protocol):
    """A finite list of problems, such as a data set. Training passes through it instead of
    drawing from it."""

    @property
    def training(self) -> Sequence[Problem]:
        """The problems to train on."""

    @property
    def digest(self) -> str:
        """Changes when the content of the list changes."""

    def begin_batch(self, number: int) -> None:
        """Called before batch `number`, the first is 0, is requested."""


class TaskDefaults:
    """The optional members of a `Task`, with their defaults. `EpisodicTask` documents them, and
    `training_scorer` and `rates`, which a task may have too."""

    system_prompt: str | None = None
    success_reward: float | None = 1.0
    measures: Mapping[str, str] = MappingProxyType({})
    scorer: RolloutScorer | None = None
    problem_list: ProblemList | None = None
    execution_s: float | None = None
    measure_answers: Callable[[Sequence[tuple[Mapping[str, Any], Rollout]]], Mapping[str, float]] | None = None
    """Rates of all sampled answers together, each with its problem; they are also in `rates`."""


def check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name} ({value}) must be between 0 and 1; it is a share of the demonstrations")
