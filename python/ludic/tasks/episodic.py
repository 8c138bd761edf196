"""The interface of tasks with episodes of one or several turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from ludic.agents.tool_use import ToolUse
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.parsers import Parser, ParseResult
from ludic.tasks.base import ProblemList
from ludic.training.types import RolloutScorer
from ludic.types import Message, Rollout

Episode = Mapping[str, Any]
"""What an environment is built from: `id`, and other JSON values of the task. The environment's
seed decides the rest."""


Played = tuple[Episode, Rollout]
"""An episode and how the model played it."""


class Turn(NamedTuple):
    """One turn of a demonstration."""

    observation: str
    action: str
    messages: Sequence[Message] | None = None
    """First turn only: the messages that begin the conversation, instead of the observation."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """First turn only: arguments of the chat template."""


class Shown(NamedTuple):
    """An episode for people to read."""

    question: str
    text: str
    """What the model did."""
    expected: str


class EpisodicTask(ABC):
    """A source of episodes and the environments that score them. Stateless: every draw comes
    from the caller's `rng`.

    A task of your own may subclass it, or just have its abstract members. It may have any of the
    others too; those that it lacks have the defaults of this class.
    """

    @property
    @abstractmethod
    def max_turns(self) -> int:
        """Number of actions in the longest episode."""

    @property
    @abstractmethod
    def max_new_tokens(self) -> int:
        """Enough tokens for every action of the teacher and the end of the turn, with a small
        margin."""

    @property
    @abstractmethod
    def reward_sees(self) -> str:
        """What the reward depends on, in words, for the report."""

    @abstractmethod
    def draw(self, rng: Random) -> Episode:
        """An episode to train on."""

    @abstractmethod
    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]]:
        """`count` whole episodes of the imperfect teacher."""

    @abstractmethod
    def make_env(self, episode: Episode) -> SingleAgentEnv:
        """The environment of one episode."""

    @abstractmethod
    def suites(self) -> Mapping[str, Sequence[Episode]]:
        """The episodes for evaluation, by name of the suite: the same in every run, for any
        seed. The first suite is also played greedily."""

    @abstractmethod
    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        """Rates of the sampled episodes of each suite. `played`: name of the suite -> pairs
        (episode, rollout). `rollout.steps` has a `Step` for each action (`prev_obs`, `action`,
        `next_obs`, `reward`, `info`), and `rollout.total_reward` is the sum of their rewards."""

    @abstractmethod
    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        """One episode for people to read."""

    @property
    def system_prompt(self) -> str | None:
        """The system prompt, unless the recipe sets one."""
        return None

    @property
    def parser(self) -> Parser:
        """Turns the model's text into the environment's action. A text that the parser rejects ends
        the episode."""
        return verbatim

    @property
    def cut_off_reward(self) -> float:
        """Reward of an action that reached the token limit, which ends the episode."""
        return 0.0

    @property
    def tool_use(self) -> ToolUse | None:
        """Functions that the model may call before each action; None: it has none."""
        return None

    @property
    def success_reward(self) -> float | None:
        """Total reward from which an episode is a success; None: undefined."""
        return None

    @property
    def facts(self) -> Mapping[str, str]:
        """Booleans of a step's info to log beside the reward: key to meaning. Each is true at
        one step of an episode at most."""
        return {}

    @property
    def rates(self) -> Mapping[str, str]:
        """What `measure` returns: key to meaning, the most telling first."""
        return {**self.facts, **self.measures}

    @property
    def measures(self) -> Mapping[str, str]:
        """Numbers of a step's info to log beside the reward: key to meaning."""
        return {}

    @property
    def scorer(self) -> RolloutScorer | None:
        """Rewards the episodes in place of the environment; None: the environment rewards them."""
        return None

    @property
    def training_scorer(self) -> RolloutScorer | None:
        """The scorer of the episodes that are trained on."""
        return self.scorer

    @property
    def sees_cut_off_answers(self) -> bool:
        """Whether an answer that reached the token limit is scored like any other. If not, it earns
        `cut_off_reward`."""
        return self.scorer is not None

    @property
    def reward_is_score(self) -> bool:
        """Whether held-out answers are rewarded by the score of a reward model, because nothing
        else rewards them."""
        return False

    @property
    def problem_list(self) -> ProblemList | None:
        """The problems to train on in passes; None: they are drawn."""
        return None

    @property
    def execution_s(self) -> float | None:
        """Wall seconds so far in which programs ran to be judged; None: there are none."""
        return None

    async def aclose(self) -> None:  # noqa: B027  most have nothing to end
        """End what the episodes have started, such as sandboxes; new episodes start it again."""


OPTIONAL_MEMBERS = tuple(
    name for name in vars(EpisodicTask) if not name.startswith("_") and name not in EpisodicTask.__abstractmethods__
)
"""Those with a default."""


def verbatim(text: str) -> ParseResult:
    """The whole completion is the action."""
    return ParseResult(action=text, reward=0.0, obs=None)


def share(truths: Iterable[bool | float]) -> float:
    """Mean of booleans or numbers; 0 where there are none."""
    values = [float(value) for value in truths]
    return sum(values) / len(values) if values else 0.0


def transcript(rollout: Rollout) -> str:
    """The actions, with the environment's answers between them, on one line."""
    parts = [part for step in rollout.steps for part in (step.action, step.next_obs or "")]
    return " ".join(" ".join(parts[:-1]).split())
