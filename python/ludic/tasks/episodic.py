"""The interface of tasks: their problems, the environments that score them, and their metrics; and
tasks around tasks, of any object with the members of a task or with tools before an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple, Protocol, TypedDict

from ludic.agents.tool_agent import CALLS_INFO, FAILED_INFO, ToolUse
from ludic.agents.tool_calls import calls_of, describe_call
from ludic.envs.env import SingleAgentEnv
from ludic.event_loop import run_in_thread
from ludic.images.content import show_content
from ludic.inference.prompts.template import read_template_kwargs
from ludic.interaction.agent_program import AgentUse
from ludic.parsers import Parser, ParseResult
from ludic.training.reducers import Denominator, Reducer
from ludic.training.types import RolloutScorer
from ludic.types import Message, Rollout, answers_of
from ludic.user_objects import forward_members


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

    observation: Any
    """Text, an image, or a list of texts, images and parts."""
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
    calls: str = ""
    """The model calls before its answer, one on a line: calls of tools with their results."""


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
        question = episode.get("question", rollout.steps[0].prev_obs)
        return Shown(show_content(question), transcript(rollout), str(episode.get("answer", "")))

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
    def agent(self) -> AgentUse | None:
        """The program that plays each episode and calls the model through a URL. None means that
        the model answers itself."""
        return None

    @property
    def teach(self) -> Callable[[str, Random], str] | None:
        """What the imperfect teacher says to a prompt of an agent, which is the text that the chat
        template makes of it: the warm-up of a task with an agent. None means no teacher."""
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
    is_one_call = task.max_turns == 1 and task.tool_use is None and task.agent is None
    each: Denominator = "samples" if is_one_call else "rollouts"
    facts = {name: Reducer("count_true", name, normalize_by=each) for name in task.facts}
    return {**facts, **{name: Reducer("mean", name) for name in task.measures}}


def transcript(rollout: Rollout) -> str:
    """The actions, with the environment's answers between them, on one line."""
    parts = [part for step in rollout.steps for part in (step.action, show_content(step.next_obs))]
    return " ".join(" ".join(parts[:-1]).split())


_WITH_DEFAULT = [name for name in vars(EpisodicTask) if not name.startswith("_") and name not in EpisodicTask.__abstractmethods__]


def as_episodic(task: Task | EpisodicTask) -> EpisodicTask:
    """`task` itself if it is an `EpisodicTask`, else an adapter around it.

    A class of the user's need not subclass anything: with `suites`, or with `max_turns` and no
    `heldout`, it is a task of episodes, else a task of one turn. Its members are read when they are
    needed, so a member that is set or changed later counts from then on.
    """
    if isinstance(task, EpisodicTask):
        return task
    has_episodes = hasattr(task, "suites") or (hasattr(task, "max_turns") and not hasattr(task, "heldout"))
    return WrappedTask(task) if has_episodes else OneTurn(task)


@forward_members("task", _WITH_DEFAULT)
class WrappedTask(EpisodicTask):
    """Has the members of `task`, an `EpisodicTask` or an object of the user's, and the defaults of
    `EpisodicTask` for those that it lacks. A subclass overrides what differs."""

    def __init__(self, task: Any) -> None:
        self.task = task

    @property
    def max_turns(self) -> int:
        return self.task.max_turns

    def draw(self, rng: Random) -> Episode:
        return self.task.draw(rng)

    def make_env(self, episode: Episode) -> SingleAgentEnv:
        return self.task.make_env(episode)


class OneTurn(WrappedTask):
    """A task of one turn, with the members of `Task`, as a task of episodes."""

    @property
    def max_turns(self) -> int:
        return 1

    @property
    def success_reward(self) -> float | None:
        return getattr(self.task, "success_reward", 1.0)

    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]] | None:
        if not hasattr(self.task, "demonstrate"):
            return None
        problems = [self.task.draw(rng) for _ in range(count)]
        turns = []
        for each in problems:
            kwargs = read_template_kwargs(each.get("row") or {}, f"problem {each['id']}")
            turns.append([Turn(each["question"], self.task.demonstrate(each, rng), prompt_messages(each), kwargs)])
        return turns

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        return {"held out": self.task.heldout()}

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        rates = super().measure(played)
        if hasattr(self.task, "measure_answers"):
            rates |= self.task.measure_answers([answer for answers in played.values() for answer in answers])
        return rates

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        return Shown(episode["question"], rollout.steps[-1].action, episode["answer"])


def prompt_messages(problem: Mapping[str, Any]) -> Sequence[Message] | None:
    """The messages of a problem with a conversation as prompt; None if the prompt is text."""
    prompt = problem["row"]["prompt"] if "row" in problem else None
    return prompt if isinstance(prompt, list) else None


class WithCalls(WrappedTask):
    """`task`, with more calls of the model than its answers. The task sees the answers
    only; people are shown the calls and their results next to them."""

    call_measures: Mapping[str, str]
    """Metrics in addition to the task's own rates, means over the answers."""

    @property
    def measures(self) -> Mapping[str, str]:
        return {**self.task.measures, **self.call_measures}

    @property
    def rates(self) -> Mapping[str, str]:
        return {**self.task.rates, **self.call_measures}

    def measure(self, played: Mapping[str, Sequence[Played]]) -> dict[str, float]:
        answers = {
            suite: [(episode, keep_answers(rollout)) for episode, rollout in episodes] for suite, episodes in played.items()
        }
        infos = [step.info for episodes in answers.values() for _, rollout in episodes for step in rollout.steps]
        means = {name: share(info[name] for info in infos if name in info) for name in self.call_measures}
        return {**self.task.measure(answers), **means}

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        before = [step for step in rollout.steps if step.info.get("intermediate_call")]
        calls = [line for step in before for line in map(describe_call, calls_of(step.info))]
        texts = [step.action for step in before if not calls_of(step.info)]
        return self.task.show(episode, keep_answers(rollout))._replace(calls="\n".join([*calls, *texts]))


MEASURES = {CALLS_INFO: "calls of tools before an answer", FAILED_INFO: "calls before an answer that failed"}


class WithTools(WithCalls):
    """`task`, in which the model may call tools before each answer."""

    call_measures = MEASURES

    def __init__(self, task: EpisodicTask, use: ToolUse) -> None:
        super().__init__(task)
        self._use = use

    @property
    def tool_use(self) -> ToolUse:
        return self._use

    async def aclose(self) -> None:
        await run_in_thread(self._use.close)
        await self.task.aclose()


def keep_answers(rollout: Rollout) -> Rollout:
    """The rollout without the model calls that called tools."""
    return replace(rollout, steps=answers_of(rollout))
