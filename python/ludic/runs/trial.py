"""Tries a task before it is trained: each method, one demonstration and two episodes. A mistake
then shows in seconds, and not after the warm-up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from numbers import Real
from random import Random
from typing import Any

from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, LudicError, error_location
from ludic.event_loop import call_outside_loop
from ludic.inference import ChatCompletionRequest
from ludic.inference.prompts.tokens import Dialogue, PromptTokens
from ludic.recipes.schema import Recipe
from ludic.runs.rollouts import make_evaluation_inference, make_protocol
from ludic.tasks import EpisodicTask
from ludic.tasks.adapters import OneTurn, WrappedTask
from ludic.tasks.episodic import Shown
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
        first = next(iter(suites.values()))
        taught = ["?"]
        if recipe.warmup.steps and recipe.warmup.data is None:
            taught = trial.demonstrate(Random("trial"), tokenizer) or taught
        answers = [taught, ["?"]]
        context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        episode = first[0] if len(first) else drawn
        for each, env in zip(answers, trial.make_envs(episode, len(answers)), strict=True):
            trial.play(env, episode, list(suites), _Scripted(each, tokenizer, context))


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
            return bool(turns) and all(isinstance(text, str) for turn in turns for text in (turn.observation, turn.action))

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
            raise ConfigError(
                f"{self._name('make_env')} returned one environment for two episodes, which are played at the same time; make a new one "
                "in each call"
            )
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

    def __init__(self, answers: Sequence[str], tokenizer: Any, context: int | None) -> None:
        self.answers, self._prompts, self._context, self._count = answers, PromptTokens(tokenizer), context, 0

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        tools = () if request.tools is None else request.tools.tools
        length = len(self._prompts.encode(Dialogue(request.messages, tools, request.chat_template_kwargs)))
        if self._context is not None and length >= self._context:
            raise ConfigError(
                f"the prompt of turn {self._count + 1} has {length} tokens if the model answers {self.answers[0]!r}, and its context is "
                f"{self._context}; shorten the observations, play fewer turns, or take a model with a longer context "
                "(network.max_positions of a new one)"
            )
        self._count += 1
        return ChatResponse(self.answers[(self._count - 1) % len(self.answers)], finish_reason="stop"), {}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error} ({error_location(error)})"
