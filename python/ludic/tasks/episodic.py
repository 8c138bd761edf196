"""The interface of tasks: their problems, the environments that score them, and their metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple, Protocol, TypedDict

from ludic.agents.tool_agent import ToolUse
from ludic.envs.env import SingleAgentEnv
from ludic.parsers import Parser, ParseResult
from ludic.training.stats import Denominator, Reducer
from ludic.training.types import RolloutScorer
from ludic.types import Message, Rollout


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
    """A source of problems with one answer each, and the environment that scores it. Stateless:
    every draw comes from the caller's `rng`.

    A task may also have `demonstrate(problem, rng)`, an answer of the imperfect teacher,
    `measure_answers(played)`, which adds rates of all sampled answers together, and the members of
    `EpisodicTask` that have a default. `success_reward` is 1 if the task lacks it.
    """

    def draw(self, rng: Random) -> Problem:
        """A problem to train on; never a held-out one."""

    def heldout(self) -> Sequence[Problem]:
        """The problems for evaluation: the same in every run, for any seed."""

    def make_env(self, problem: Problem) -> SingleAgentEnv:
        """The environment of one episode: one answer, reward 1 or 0."""


class ProblemList:
    """A finite list of problems, such as a data set. Training passes through it instead of
    drawing from it: each problem once before any is repeated."""

    training: Sequence[Problem]
    """The problems to train on."""
    digest: str
    """Changes when the content of the list changes."""

    @property
    def problem_list(self) -> ProblemList:
        return self

    def begin_batch(self, number: int) -> None:
        """Called before batch `number`, the first is 0, is requested."""

    def draw(self, rng: Random) -> Problem:
        return rng.choice(self.training)


Episode = Mapping[str, Any]
"""What an environment is built from: `id`, and other JSON values of the task. The environment's
seed decides the rest."""


Played = tuple[Episode, Rollout]
"""An episode and how the model played it."""


_DRAWN = 500  # held-out episodes of a task without suites


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

    A task of your own needs `max_turns`, `draw` and `make_env`; the other members have defaults. It
    may subclass this class, or just have its members.
    """

    @property
    @abstractmethod
    def max_turns(self) -> int:
        """Number of actions in the longest episode."""

    @abstractmethod
    def draw(self, rng: Random) -> Episode:
        """An episode to train on."""

    @abstractmethod
    def make_env(self, episode: Episode) -> SingleAgentEnv:
        """The environment of one episode."""

    @property
    def max_new_tokens(self) -> int:
        """Enough tokens for every action of the teacher and the end of the turn, with a small
        margin."""
        return 256

    @property
    def reward_sees(self) -> str:
        """What the reward depends on, in words, for the report."""
        return "what the environment rewards"

    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]] | None:
        """`count` whole episodes of the imperfect teacher. None means no teacher, and no
        warm-up."""
        return None

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        """The episodes for evaluation, by name of the suite: the same in every run, for any
        seed. The first suite is also played greedily. By default episodes that `draw` returns."""
        rng = Random("held out")
        return {"held out": [self.draw(rng) for _ in range(_DRAWN)]}

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        """Rates of the sampled episodes of each suite, in addition to their mean reward. `played`:
        name of the suite -> pairs (episode, rollout). `rollout.steps` has a `Step` for each action
        (`prev_obs`, `action`, `next_obs`, `reward`, `info`), and `rollout.total_reward` is the sum
        of their rewards. By default the shares of `facts` and the means of `measures`."""
        infos = [[step.info for step in rollout.steps] for episodes in played.values() for _, rollout in episodes]
        facts = {name: share(any(info.get(name, False) for info in steps) for steps in infos) for name in self.facts}
        means = [name for name in self.rates if name in self.measures]
        return {**facts, **{name: share(info[name] for steps in infos for info in steps if name in info) for name in means}}

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        """One episode for people to read. By default the dialogue."""
        return Shown(str(episode.get("question", rollout.steps[0].prev_obs)), transcript(rollout), str(episode.get("answer", "")))

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
        """Functions that the model may call before each action. None means no tools."""
        return None

    @property
    def success_reward(self) -> float | None:
        """Total reward from which an episode is a success. None means undefined."""
        return None

    @property
    def facts(self) -> Mapping[str, str]:
        """Booleans of a step's info to log in addition to the reward: key to meaning. Each is true
        at one step of an episode at most."""
        return {}

    @property
    def rates(self) -> Mapping[str, str]:
        """What `measure` returns: key to meaning, the most telling first."""
        return {**self.facts, **self.measures}

    @property
    def measures(self) -> Mapping[str, str]:
        """Numbers of a step's info to log in addition to the reward: key to meaning."""
        return {}

    @property
    def scorer(self) -> RolloutScorer | None:
        """Rewards the episodes in place of the environment. None if the environment rewards
        them."""
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
        """The problems to train on in passes. None if they are drawn."""
        return None

    @property
    def execution_s(self) -> float | None:
        """Wall seconds so far in which programs ran to be judged. None if there are none."""
        return None

    async def aclose(self) -> None:  # noqa: B027  most have nothing to end
        """End what the episodes have started, such as sandboxes; new episodes start it again."""


def verbatim(text: str) -> ParseResult:
    """The whole completion is the action."""
    return ParseResult(action=text, reward=0.0, obs=None)


def share(truths: Iterable[bool | float]) -> float:
    """Mean of booleans or numbers; 0 where there are none."""
    values = [float(value) for value in truths]
    return sum(values) / len(values) if values else 0.0


def logged_names(task: EpisodicTask) -> list[str]:
    """The keys of all facts and measures, facts first."""
    return [*task.facts, *task.measures]


def task_reducers(task: EpisodicTask) -> dict[str, Reducer]:
    """Facts are shares of all samples, or of all episodes where these have several model calls.
    Measures are means over the samples that have them."""
    each: Denominator = "samples" if task.max_turns == 1 and task.tool_use is None else "rollouts"
    facts = {name: Reducer("count_true", name, normalize_by=each) for name in task.facts}
    return {**facts, **{name: Reducer("mean", name) for name in task.measures}}


def transcript(rollout: Rollout) -> str:
    """The actions, with the environment's answers between them, on one line."""
    parts = [part for step in rollout.steps for part in (step.action, step.next_obs or "")]
    return " ".join(" ".join(parts[:-1]).split())
