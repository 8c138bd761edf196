"""Tries a task before it is trained, so that a mistake shows in seconds, and not after the warm-up:
each method, one demonstration and two episodes; whether the tokenizer can render what the task
shows a model; and whether the prompts of a data set leave room for an answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from numbers import Real
from random import Random
from typing import Any

from ludic.context import GivenDialog
from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, LudicError, error_location
from ludic.event_loop import await_if_needed, call_outside_loop
from ludic.images.content import intern_observation
from ludic.images.store import current_store
from ludic.inference import ChatCompletionRequest
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.prompts.images import find_processor
from ludic.inference.prompts.template import Dialogue, read_template, read_template_kwargs
from ludic.interaction.single_agent import store_images
from ludic.models.wrappers import find_text_config
from ludic.recipes.schema import Recipe
from ludic.runs.rollouts import make_evaluation_inference, make_protocol
from ludic.tasks import Episode, EpisodicTask
from ludic.tasks.episodic import OneTurn, Shown, WrappedTask, prompt_messages
from ludic.training.rng import preserved_rng
from ludic.training.rollouts.engine import close_environment
from ludic.types import ChatResponse

logger = logging.getLogger(__name__)


def try_task(recipe: Recipe, task: EpisodicTask, tokenizer: Any, model: Any) -> None:
    """Raise ConfigError for a method that fails or returns something of another type, for an action
    of the teacher beyond the token limit, and for an episode beyond the context of the model, with
    the teacher's actions or with answers that mean nothing. Reward functions are not called, and
    programs that judge are not run. The random generators stay as they are."""
    trial = _Trial(recipe, task)
    with preserved_rng():
        drawn, suites = trial.read_episodes(Random("trial"))
        if task.agent is not None:
            return  # it is tried with the model, when that can sample
        first = next(iter(suites.values()))
        taught = ["?"]
        if recipe.warmup.steps and recipe.warmup.data is None:
            taught = trial.demonstrate(Random("trial"), tokenizer) or taught
        answers = [taught, ["?"]]
        context = getattr(find_text_config(model), "max_position_embeddings", None)
        episode = first[0] if len(first) else drawn
        for each, env in zip(answers, trial.make_envs(episode, len(answers)), strict=True):
            trial.play(env, episode, list(suites), _Scripted(each, PromptEncoder(tokenizer, find_processor(tokenizer)), context))


class _Trial:
    def __init__(self, recipe: Recipe, task: EpisodicTask) -> None:
        self._recipe, self._task, own, is_one_turn = recipe, task, task, False
        while isinstance(own, WrappedTask):
            own, is_one_turn = own.task, isinstance(own, OneTurn)
        self._user = own
        self._keys = ("id", "question", "answer") if is_one_turn else ("id",)
        self._renamed = {"suites": "heldout", "demonstrations": "demonstrate"} if is_one_turn else {}

    def read_episodes(self, rng: Random) -> tuple[Any, Mapping[str, Any]]:
        """An episode that is drawn, and the suites."""

        def is_episode(value: Any) -> bool:
            return isinstance(value, Mapping) and all(key in value for key in self._keys)

        def are_suites(value: Any) -> bool:
            measured = self._recipe.evaluation.prompts
            return bool(value) and all(
                not len(episodes) or all(map(is_episode, islice(episodes, measured))) for episodes in value.values()
            )

        expected = f"a mapping with {', '.join(self._keys)}"
        drawn = self._call("draw", rng, is_right=is_episode, expected=expected)
        several = f"a list, each episode {expected}" if self._renamed else f"a mapping of names to lists, each episode {expected}"
        return drawn, self._call("suites", is_right=are_suites, expected=several)

    def demonstrate(self, rng: Random, tokenizer: Any) -> list[str] | None:
        """The actions of a demonstration; None without a teacher."""

        def is_right(value: Any) -> bool:
            if value is None:
                return True
            [turns] = value
            contents = [intern_observation(turn.observation, current_store()) for turn in turns]
            return bool(contents) and all(isinstance(turn.action, str) for turn in turns)

        expected = "the answer as text" if self._renamed else "`count` lists of Turn(observation, action)"
        demonstrations = self._call("demonstrations", 1, rng, is_right=is_right, expected=expected)
        if demonstrations is None:
            return None
        [turns] = demonstrations
        chosen = self._recipe.rollout.max_new_tokens
        limit = chosen or self._task.max_new_tokens
        for turn in turns:
            length = len(tokenizer(turn.action, add_special_tokens=False)["input_ids"]) + 1
            if length > limit:
                fault = (
                    f"{self._name('demonstrations')} has the action {turn.action!r} of {length} tokens with the end token, and the model "
                    f"may sample {limit} ({'rollout.' if chosen else ''}max_new_tokens); raise it, or shorten the actions"
                )
                if chosen is None:
                    raise ConfigError(fault)
                logger.warning(fault)
                break
        return [turn.action for turn in turns]

    def make_envs(self, episode: Mapping[str, Any], count: int) -> list[Any]:
        """All before one is played: a pool may give an environment again after it was closed."""
        is_right = lambda value: isinstance(value, LudicEnv)  # noqa: E731
        envs = [self._call("make_env", episode, is_right=is_right, expected="a SingleAgentEnv") for _ in range(count)]
        if len(set(map(id, envs))) < count:
            raise ConfigError(f"{self._name('make_env')} returned one environment for two episodes; make a new one in each call")
        return envs

    def play(self, env: Any, episode: Mapping[str, Any], suites: Sequence[str], client: Any) -> None:
        """Play the episode in `env` and close it, as the engine does."""
        task, prompt = self._task, self._recipe.rollout.system_prompt
        if task.execution_s is not None:
            return
        inference = make_evaluation_inference(self._recipe.rollout, task, greedy=True)
        protocol = make_protocol(task, client, "trial", prompt)

        async def run() -> Any:
            try:
                return await protocol.run(env=env, max_steps=task.max_turns, env_seed=0, inference=inference)
            finally:
                await close_environment(env)

        try:
            [rollout] = call_outside_loop(lambda: asyncio.run(run()), on_interrupt=lambda: None)
        except ConfigError:
            raise
        except Exception as error:  # in training such an episode has failed, and others go on
            failed = "an episode of %s with the answer %r failed: %s; failed episodes are left out of training"
            logger.warning(failed, type(self._user).__name__, client.answers[0], _describe(error))
            return
        self._call(
            "measure",
            {name: [(episode, rollout)] for name in suites},
            is_right=lambda rates: all(isinstance(name, str) and isinstance(rate, Real) for name, rate in rates.items()),
            expected="a mapping of names to numbers, from lists of (episode, rollout) by suite",
        )
        is_shown = lambda value: isinstance(value, Shown) and all(isinstance(text, str) for text in value)  # noqa: E731
        self._call("show", episode, rollout, is_right=is_shown, expected="Shown(question, text, expected) of texts")

    def _name(self, method: str) -> str:
        """As the user wrote it."""
        return f"{type(self._user).__name__}.{self._renamed.get(method, method)}"

    def _call(self, method: str, *arguments: Any, is_right: Callable[[Any], bool], expected: str) -> Any:
        try:
            value = getattr(self._task, method)(*arguments)
        except LudicError:
            raise
        except Exception as error:
            raise ConfigError(f"{self._name(method)} raised {_describe(error)}; it must return {expected}") from error
        try:
            is_fine = is_right(value)
        except (AttributeError, TypeError, KeyError, IndexError, ValueError):
            is_fine = False
        if not is_fine:
            raise ConfigError(f"{self._name(method)} returned {repr(value)[:80]}; it must return {expected}")
        return value


class _Scripted:
    """Gives the answers in turn, and begins again after the last."""

    def __init__(self, answers: Sequence[str], prompts: PromptEncoder, context: int | None) -> None:
        self.answers, self._prompts, self._context, self._count = answers, prompts, context, 0

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        length = len(self._prompts.encode(Dialogue.of(request)).ids)
        if self._context is not None and length >= self._context:
            raise ConfigError(
                f"the prompt of turn {self._count + 1} has {length} tokens if the model answers {self.answers[0]!r}, "
                f"and its context is {self._context}; play fewer turns, or take a longer context (network.max_positions)"
            )
        self._count += 1
        return ChatResponse(self.answers[(self._count - 1) % len(self.answers)], finish_reason="stop"), {}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error} ({error_location(error)})"


MODEL = "the context of the model"
MEASURED = 1000
"""Prompts that are measured for the warning, in the order of the data."""


def check_dialogues(task: EpisodicTask, problems: Iterable[Episode], tokenizer: Any) -> None:
    """Raise `ConfigError` if the tokenizer has no chat template, and the task shows the model a
    dialogue: in a later turn, or as a prompt of messages. Raise it, too, if its template cannot
    show the task's tools."""
    if task.tool_use is not None:
        try:
            PromptEncoder(tokenizer).tool_format(task.tool_use.schemas)
        except ConfigError as error:
            names = ", ".join(function.__name__ for function in task.tool_use.functions)
            raise ConfigError(f"the model cannot be shown its tools ({names}): {error}; set chat_template=FILE") from error
    if not read_template(tokenizer) and (task.max_turns > 1 or any(map(prompt_messages, problems))):
        shown = f"episodes of up to {task.max_turns} turns" if task.max_turns > 1 else "prompts of messages"
        raise ConfigError(
            f"the task has {shown}, and the tokenizer has no chat template; set chat_template=FILE, or tokenizer=FOLDER with one"
        )


def check_prompts(recipe: Recipe, task: EpisodicTask, tokenizer: Any) -> None:
    """Raise `ConfigError` if the tokenizer cannot render the prompts of a task, or if no prompt
    leaves room for an answer."""
    problems = task.problem_list
    check_dialogues(task, () if problems is None else problems.training, tokenizer)
    if problems is None or recipe.steps == 0:
        return
    lengths = PromptLengths(recipe, task, tokenizer)
    first_chat = next((problem for problem in problems.training if prompt_messages(problem) is not None), None)
    if first_chat is not None:
        lengths.measure(first_chat)
    room = recipe.trainer.max_seq_len
    if all(lengths.measure(problem) >= room for problem in problems.training):
        shortest = min(map(lengths.measure, problems.training), default=0)
        raise ConfigError(f"trainer.max_seq_len ({room}) must exceed the shortest prompt ({shortest} tokens)")


async def _begin(env: Any) -> Any:
    """The first observation of an environment, which is closed."""
    try:
        return await await_if_needed(env.env_reset())
    finally:
        await close_environment(env)


class PromptLengths:
    """Measures the first prompts of a task's problems in tokens."""

    def __init__(self, recipe: Recipe, task: EpisodicTask, tokenizer: Any) -> None:
        self.system_prompt = recipe.rollout.system_prompt or task.system_prompt
        self._task, self._tokens = task, PromptEncoder(tokenizer, find_processor(tokenizer))
        self._tools = [] if task.tool_use is None else task.tool_use.schemas

    def measure(self, problem: Episode, *, with_system_prompt: bool = True) -> int:
        context = GivenDialog(self.system_prompt if with_system_prompt else None)
        begun = _begin(self._task.make_env(problem))
        observation, info = store_images(call_outside_loop(lambda: asyncio.run(begun), on_interrupt=lambda: None))
        context.on_env_reset(observation, info)
        arguments = read_template_kwargs(info, f"problem {problem['id']}")
        return len(self._tokens.encode(Dialogue(context.on_before_act(), self._tools, arguments)).ids)


def warn_of_long_prompts(recipe: Recipe, task: EpisodicTask, tokenizer: Any, model: Any) -> None:
    """Log a warning, with numbers, if some prompts leave less room than an answer may take."""
    problems = task.problem_list
    if problems is None or recipe.steps == 0:
        return
    lengths = PromptLengths(recipe, task, tokenizer)
    context = getattr(find_text_config(model), "max_position_embeddings", None)
    limits = {"trainer.max_seq_len": recipe.trainer.max_seq_len, MODEL: context}
    setting, limit = min(((name, size) for name, size in limits.items() if size), key=lambda pair: pair[1])
    answer = recipe.rollout.max_new_tokens or task.max_new_tokens
    measured = [(lengths.measure(problem), problem) for problem in islice(problems.training, MEASURED)]
    tight = [used for used, _ in measured if used + answer > limit]
    if not tight:
        return
    longest, problem = max(measured, key=lambda pair: pair[0])
    added = longest - lengths.measure(problem, with_system_prompt=False) if lengths.system_prompt else 0
    logger.warning(
        "%d of the first %d prompts leave less than the %d tokens that an answer may have (rollout.max_new_tokens): %s is %d tokens, and "
        "the longest prompt has %d%s. What does not fit is cut off; %s",
        *(len(tight), len(measured), answer, setting, limit, longest),
        f", {added} of them from the system prompt" if added > 0 else "",
        "shorten prompts or answers" if setting == MODEL else f"raise {setting}, or shorten prompts or answers",
    )
