"""The task and the algorithm of a run: of a recipe with `environments`, a mixture of their tasks,
and credit that each of them computes on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

from ludic.data.passes import Shares
from ludic.envs.env import SingleAgentEnv
from ludic.errors import ConfigError
from ludic.images.content import intern_observation
from ludic.images.store import current_store
from ludic.recipes.build import add_reward_model, build_algorithm, build_episodic_task, normalize_each
from ludic.recipes.environments import read_weights, split_recipe
from ludic.recipes.schema import Recipe
from ludic.tasks.episodic import Episode, EpisodicTask, Turn, task_reducers
from ludic.training.algorithm import RLAlgorithm
from ludic.training.reducers import Reducer
from ludic.training.rollouts.to_samples import group_by_environment
from ludic.training.types import CreditAssigner, RolloutScorer
from ludic.types import ENVIRONMENT, Rollout

EPISODE = "episode"
"""Key of an environment's own episode in one of a mixture."""


@dataclass(frozen=True)
class Source:
    """An environment of a recipe."""

    recipe: Recipe
    """With the settings of the environment."""
    task: EpisodicTask


class Mixture(EpisodicTask):
    """The tasks of several environments in one run. An episode has `id`, `environment` and
    `episode`, which the environment of that name plays with its own settings."""

    def __init__(self, recipe: Recipe, sources: Mapping[str, Source]) -> None:
        self.recipe, self.sources = recipe, dict(sources)

    def with_tasks(self, tasks: Mapping[str, EpisodicTask]) -> Mixture:
        """The same with other tasks."""
        return Mixture(self.recipe, {name: replace(self.sources[name], task=task) for name, task in tasks.items()})

    def share_positions(self, prompts: int) -> Shares:
        """Which environment the problem at each position is of, with this number in a step."""
        return Shares([{step * prompts: each for step, each in weights.items()} for weights in read_weights(self.recipe)])

    @property
    def max_turns(self) -> int:
        return max(source.task.max_turns for source in self.sources.values())

    @property
    def max_new_tokens(self) -> int:
        return max(source.recipe.rollout.max_new_tokens or source.task.max_new_tokens for source in self.sources.values())

    def draw(self, rng: Random) -> Episode:
        name = rng.choice(list(self.sources))
        return tag(name, self.sources[name].task.draw(rng))

    def make_env(self, episode: Episode) -> SingleAgentEnv:
        return self.sources[episode[ENVIRONMENT]].task.make_env(episode[EPISODE])

    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]] | None:
        """Each environment with a teacher has its weight of the first step as its share."""
        weights = [weights.get(0, 0) for weights in read_weights(self.recipe)]
        taught = {
            name: weight
            for (name, source), weight in zip(self.sources.items(), weights, strict=True)
            if weight and source.task.agent is None and source.task.demonstrations(1, Random("trial")) is not None
        }
        if not taught:
            return None
        drawn = rng.choices(list(taught), [float(weight) for weight in taught.values()], k=count)
        made = {name: iter(self._demonstrate(name, drawn.count(name), rng)) for name in taught}
        return [next(made[name]) for name in drawn]

    def _demonstrate(self, name: str, count: int, rng: Random) -> Sequence[Sequence[Turn]]:
        """With the environment's own system prompt, if it has one."""
        source = self.sources[name]
        prompt, episodes = find_system_prompt(source), source.task.demonstrations(count, rng) or []
        if prompt is None:
            return episodes
        opened = []
        for first, *later in episodes:
            seen = intern_observation(first.observation, current_store())
            messages = list(first.messages or [{"role": "user", "content": seen}])
            if messages[0]["role"] not in ("system", "developer"):
                messages = [{"role": "system", "content": prompt}, *messages]
            opened.append([first._replace(messages=messages), *later])
        return opened

    @property
    def facts(self) -> Mapping[str, str]:
        return self._label("facts")

    @property
    def measures(self) -> Mapping[str, str]:
        return self._label("measures")

    def _label(self, kind: str) -> dict[str, str]:
        each = {name: getattr(source.task, kind) for name, source in self.sources.items()}
        return {f"{name}/{key}": f"{name}: {meaning}" for name, own in each.items() for key, meaning in own.items()}

    @property
    def reward_sees(self) -> str:
        return "; ".join(f"in {name} {source.task.reward_sees}" for name, source in self.sources.items())

    @cached_property
    def training_scorer(self) -> RolloutScorer | None:
        scorers = {name: source.task.training_scorer for name, source in self.sources.items()}
        own = {name: scorer for name, scorer in scorers.items() if scorer is not None}
        return ScoreByEnvironment(own) if own else None

    @property
    def execution_s(self) -> float | None:
        seconds = [source.task.execution_s for source in self.sources.values()]
        known = [each for each in seconds if each is not None]
        return sum(known) if known else None

    async def aclose(self) -> None:
        for source in self.sources.values():
            await source.task.aclose()


def tag(name: str, episode: Episode) -> Episode:
    return {"id": f"{name}/{episode['id']}", ENVIRONMENT: name, EPISODE: episode}


def find_system_prompt(source: Source) -> str | None:
    """The recipe's if it sets one, else the task's."""
    return source.recipe.rollout.system_prompt or source.task.system_prompt


def list_parts(recipe: Recipe, task: EpisodicTask) -> list[Source]:
    """The environments of a run; the recipe and its task alone without any."""
    return list(task.sources.values()) if isinstance(task, Mixture) else [Source(recipe, task)]


def run_reducers(task: EpisodicTask) -> dict[str, Reducer]:
    """`task_reducers`, of each environment over its own samples."""
    if not isinstance(task, Mixture):
        return task_reducers(task)
    return {
        f"{name}/{key}": replace(reducer, environment=name)
        for name, source in task.sources.items()
        for key, reducer in task_reducers(source.task).items()
    }


def build_run_task(recipe: Recipe) -> EpisodicTask:
    """The task of a recipe, a `Mixture` if it has environments. Errors name the environment."""
    sources = {}
    for name, part in split_recipe(recipe).items():
        try:
            sources[name] = Source(part, build_episodic_task(part))
        except ConfigError as error:
            raise ConfigError(f"environments.{name}: {error}") from error
    return Mixture(recipe, sources) if sources else build_episodic_task(recipe)


def add_reward_models(recipe: Recipe, task: EpisodicTask, tokenizer: Any) -> EpisodicTask:
    """`add_reward_model`, of each environment on its own."""
    if not isinstance(task, Mixture):
        return add_reward_model(recipe, task, tokenizer)
    return task.with_tasks({name: add_reward_model(each.recipe, each.task, tokenizer) for name, each in task.sources.items()})


def build_run_algorithm(recipe: Recipe, task: EpisodicTask) -> RLAlgorithm:
    """The algorithm of a recipe. With environments each gives credit to its own rollouts, so that
    what a batch is normalised by are the rewards of one environment. Raises ConfigError for
    different groups with an algorithm whose loss compares answers."""
    if not isinstance(task, Mixture):
        return _build_algorithm(recipe, task)
    algorithm = _build_algorithm(replace(recipe, reward_normalize="sum"), task)
    sizes = {source.recipe.rollout.group_size for source in task.sources.values()}
    if sizes != {recipe.rollout.group_size} and algorithm.batch_credit is not None:
        raise ConfigError(
            f"environments differ in rollout.group_size, and the loss of {algorithm.name} compares answers; set one"
        )
    own = {name: _build_algorithm(source.recipe, source.task) for name, source in task.sources.items()}
    credit = CreditByEnvironment({name: each.credit_assigner for name, each in own.items()})
    return replace(algorithm, credit_assigner=credit)


def _build_algorithm(recipe: Recipe, task: EpisodicTask) -> RLAlgorithm:
    algorithm = build_algorithm(recipe, max_completion_tokens=recipe.rollout.max_new_tokens or task.max_new_tokens)
    return normalize_each(algorithm, task.training_scorer) if recipe.reward_normalize == "each" else algorithm


@dataclass(frozen=True)
class CreditByEnvironment:
    """Each environment's credit assigner computes the weights of its rollouts, as if there were no
    others."""

    assigners: Mapping[str, CreditAssigner]

    def compute(self, rollouts: Sequence[Rollout]) -> dict[tuple[str, int], Any]:
        weights: dict[tuple[str, int], Any] = {}
        for name, own in group_by_environment(rollouts).items():
            weights |= self.assigners[name].compute(own)
        return weights


@dataclass(frozen=True)
class ScoreByEnvironment:
    """Each environment's scorer rewards its rollouts; those without one keep their rewards."""

    scorers: Mapping[str, RolloutScorer]

    async def score(self, rollouts: Sequence[Rollout]) -> Mapping[str, Exception]:
        grouped = group_by_environment(rollouts)
        scored = await asyncio.gather(*(scorer.score(grouped[name]) for name, scorer in self.scorers.items() if name in grouped))
        return {id: error for errors in scored for id, error in errors.items()}
