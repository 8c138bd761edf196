"""The rollouts of a recipe: the requests of each batch, the engine that plays them, and the
sampling parameters.

The logs to which the batch source of a run appends, and their sizes in its state: batches that
are made again after a resume replace their lines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from ludic.agents import Agent
from ludic.context import GivenDialog
from ludic.data.passes import Passes, shuffle_range
from ludic.envs.env import SingleAgentEnv
from ludic.errors import ConfigError
from ludic.files.jsonl import measure_log, truncate_log
from ludic.inference import ChatClient, InferenceSpec, ReturnSpec
from ludic.inference.request import make_sampling
from ludic.interaction import SingleAgentProtocol
from ludic.interaction.single_agent import InteractionProtocol
from ludic.recipes.actors import build_group_filter, choose_lag
from ludic.recipes.mixture import Mixture, tag
from ludic.recipes.schema import Recipe, RolloutSection
from ludic.runs.directory import RunDirectory
from ludic.tasks import Episode, EpisodicTask, Task, as_episodic
from ludic.tasks.episodic import ProblemList
from ludic.training.batching.overlapped import GENERATION_S
from ludic.training.batching.source import BATCH_NUMBER, RolloutBatchSource
from ludic.training.info_seed import InfoSeed, SeedPrompts, seed_tagged
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.rollouts.group_ledger import Group, check_number
from ludic.training.rollouts.log import RolloutLog
from ludic.training.rollouts.requests import GRPORequestStrategy, RequestStrategy
from ludic.training.rollouts.rolling import RollingBatchSource
from ludic.training.types import CreditAssigner, EnvSpec, ProtocolSpec, RolloutRequest, SAWBatch
from ludic.types import ENVIRONMENT, Rollout

ENV_KIND, PROTOCOL_KIND = "task", "single_agent"


def make_engine(
    task: Task | EpisodicTask,
    client: ChatClient,
    *,
    model_name: str,
    system_prompt: str | None,
    trained: bool = False,
    info_seed: InfoSeed | None = None,
    **settings: Any,
) -> RolloutEngine:
    """The engine that plays a task.

    An action that the token limit cuts off, or that the task's parser rejects, does not reach the
    environment: it gets the task's penalty and ends an episode of several turns. Reward functions,
    if the task has them, see every answer. Before it the model may call the task's tools
    (`ReActAgent`). `trained`: the rollouts are trained on and therefore
    rewarded by the task's reward model, if it has one. Without a `system_prompt` the task's own is
    used; an environment of a `Mixture` has its own. `info_seed`: prompts of requests with a seed
    name it. `settings` are arguments of `RolloutEngine`, such as `jsonl_path` and `max_retries`."""
    played = as_episodic(task)
    scorer = played.training_scorer if trained else played.scorer

    def make_env(problem: Episode) -> SingleAgentEnv:
        return played.make_env(problem)

    def make_own_protocol(environment: str | None = None) -> InteractionProtocol:
        if environment is None or not isinstance(played, Mixture):
            return make_protocol(played, client, model_name, system_prompt)
        source = played.sources[environment]
        own_prompt, turns = source.recipe.rollout.system_prompt, source.task.max_turns
        return make_protocol(source.task, client, model_name, own_prompt, max_turns=turns)

    return RolloutEngine(
        env_registry={ENV_KIND: make_env if info_seed is None else seed_tagged(make_env, info_seed)},
        protocol_registry={PROTOCOL_KIND: make_own_protocol},
        scorer=scorer,
        **settings,
    )


def make_protocol(
    task: EpisodicTask, client: ChatClient, model_name: str, system_prompt: str | None, *, max_turns: int | None = None
) -> InteractionProtocol:
    """What plays an episode of the task: its agent program if it has one, else an agent that
    answers, and may call the task's tools. `max_turns`: the most turns, where the engine allows
    more."""
    if task.agent is not None:
        return task.agent.make_protocol(client, system_prompt=system_prompt or task.system_prompt)
    make_agent = Agent if task.tool_use is None else task.tool_use.make_agent
    agent = make_agent(
        client=client,
        model=model_name,
        ctx=GivenDialog(system_prompt=system_prompt or task.system_prompt),
        parser=task.parser,
        reject_incomplete_completions=not task.sees_cut_off_answers,
        incomplete_completion_penalty=task.cut_off_reward,
    )
    return SingleAgentProtocol(agent=agent, stop_on_parse_error=task.max_turns > 1, max_steps=max_turns)


def check_rollouts(recipe: Recipe, task: EpisodicTask) -> None:
    """Raise `ConfigError` for settings that the sampler or the algorithm would reject only after
    the warm-up."""
    make_training_inference(recipe.rollout, task)
    group_size = recipe.algorithm_args.get("group_size", recipe.rollout.group_size)
    if group_size != recipe.rollout.group_size:
        raise ConfigError(f"algorithm_args.group_size ({group_size}) must be rollout.group_size ({recipe.rollout.group_size})")
    if recipe.info_seed.num_seeds and (task.max_turns > 1 or task.tool_use is not None):
        raise ConfigError(f"info_seed.num_seeds ({recipe.info_seed.num_seeds}) needs a task of one turn; leave tools out, too")
    cfg = recipe.trainer
    if recipe.rollout.keep_candidates and (
        cfg.logits != "full" or cfg.prefix_sharing == "tree" or not recipe.rollout.temperature
    ):
        raise ConfigError(
            f"rollout.keep_candidates needs trainer.logits=full ({cfg.logits}), trainer.prefix_sharing=auto or off "
            f"({cfg.prefix_sharing}) and a rollout.temperature above 0 ({recipe.rollout.temperature:g}); set these too"
        )


def make_request(problem: Episode, *, inference: InferenceSpec, seed: int | None, **meta: Any) -> RolloutRequest:
    """A request for one episode on `problem`. `seed` is used by the environment and the sampling;
    None leaves both to the engine that plays the request."""
    return RolloutRequest(
        env=EnvSpec(kind=ENV_KIND, kwargs={"problem": problem}),
        protocol=ProtocolSpec(kind=PROTOCOL_KIND),
        env_seed=seed,
        sampling_seed=seed,
        inference=inference,
        meta={"problem_id": problem["id"], **meta},
    )


def make_training_inference(section: RolloutSection, task: EpisodicTask) -> InferenceSpec:
    """The sampling of training; log-probabilities are returned with the tokens."""
    max_tokens = section.max_new_tokens or task.max_new_tokens
    return InferenceSpec(sampling=make_sampling(section, max_tokens=max_tokens), return_=ReturnSpec.for_rl())


def make_evaluation_inference(section: RolloutSection, task: EpisodicTask, *, greedy: bool) -> InferenceSpec:
    """The sampling of held-out measurement: as in training, or greedy."""
    changes = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} if greedy else {}
    max_tokens = section.max_new_tokens or task.max_new_tokens
    return InferenceSpec(sampling=make_sampling(section, max_tokens=max_tokens, **changes), return_=ReturnSpec.for_eval())


class PlayedBatches(RolloutBatchSource):
    """Plays the requests of a run. The rollouts of every `log_every`-th batch go to the log in the
    run's folder. A batch's meta has its number, and how long it took.

    The state is the state of the requests, the number of episodes and the sizes of the logs.
    Batches that are played again after a resume replace their lines in these.
    """

    def __init__(
        self,
        section: RolloutSection,
        engine: RolloutEngine,
        requests: TrainingRequests,
        credit: CreditAssigner,
        *,
        max_steps: int,
        directory: RunDirectory,
    ) -> None:
        self._log = RolloutLog(directory.rollouts, section.log_every)
        self._requests, self._logs = requests, BatchLogs(directory)
        super().__init__(
            engine=engine,
            requests_fn=requests,
            credit_assigner=credit,
            max_steps=max_steps,
            concurrency=section.concurrency,
            on_rollouts=self._take_rollouts,
        )

    async def next_batch(self) -> SAWBatch:
        number, started = self._requests.batches, time.perf_counter()
        batch = await super().next_batch()
        batch.meta |= {BATCH_NUMBER: number, GENERATION_S: time.perf_counter() - started, **self._requests.metrics}
        return batch

    def _take_rollouts(self, rollouts: list[Rollout]) -> None:
        self._log.write(self._requests.batches - 1, rollouts)
        self._requests.observe(rollouts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state_before = None
        self._requests.load_state_dict(state)
        engines = [state["engine"]] if "engine" in state else state.get("engines", {}).values()  # two in older versions
        self.engine.load_state_dict({"episodes": sum(engine["episodes"] for engine in engines)})
        self._logs.load_state_dict(state)

    def _current_state(self) -> dict[str, Any]:
        return {**self._requests.state_dict(), "engine": self.engine.state_dict(), **self._logs.state_dict()}


class TrainingRequests:
    """The requests of each batch: `prompts` problems with `group_size` episodes each, and with one
    for each seed of InfoSeed; `greedy` adds a greedy one. Batch `k` depends only on the seed and
    `k`."""

    def __init__(
        self, task: EpisodicTask, section: RolloutSection, *, seed: int, info_seed: InfoSeed | None = None, greedy: bool = False
    ) -> None:
        self._task, self._section, self._seed = task, section, seed
        self._inference = make_training_inference(section, task)
        self._strategy: RequestStrategy = GRPORequestStrategy(section.group_size, greedy)
        if info_seed is not None:
            self._strategy = SeedPrompts(section.group_size, info_seed)
        self.batches = 0
        self.metrics: dict[str, float] = {}
        """Statistics of the choice of problems, for the log."""

    def __call__(self) -> Sequence[RolloutRequest]:
        self.begin_batch(self.batches)
        requests = self.list_problems(self.batches)
        self.batches += 1
        return self._strategy.expand(requests)

    def begin_batch(self, number: int, oldest: int | None = None) -> None:
        """Called before batch `number` is requested. `oldest`: the position of the oldest problem
        that is being played; None means that none is."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Called with the rewarded rollouts of whole groups."""

    def list_problems(self, number: int) -> list[RolloutRequest]:
        """The requests of batch `number`, one for each problem."""
        rng = Random(f"rollouts {self._seed} {number}")
        return [
            make_request(self._choose_problem(rng, number, position), inference=self._inference, seed=rng.randrange(2**31))
            for position in range(self._section.prompts)
        ]

    def _choose_problem(self, rng: Random, number: int, position: int) -> Episode:
        """Problem `position` of batch `number`."""
        return self._task.draw(rng)

    def state_dict(self) -> dict[str, Any]:
        """The number of batches so far."""
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "batches" not in state:
            raise ConfigError("the checkpoint has over-sampling or a group filter; resume it with its settings")
        self.batches = int(state["batches"])


class PassRequests(TrainingRequests):
    """The requests for a task with a list of problems, `training`: passes over the list, each in
    an order that follows from the seed and the number of the pass."""

    def __init__(self, task: EpisodicTask, problems: ProblemList, section: RolloutSection, **settings: Any) -> None:
        super().__init__(task, section, **settings)
        self._data = problems
        self._passes = Passes(
            len(problems.training), lambda number: shuffle_range(len(problems.training), f"pass {self._seed} {number}")
        )

    def begin_batch(self, number: int, oldest: int | None = None) -> None:
        self._data.begin_batch(number)

    def _choose_problem(self, rng: Random, number: int, position: int) -> Episode:
        return self._data.training[self._passes.at(number * self._section.prompts + position)]

    def state_dict(self) -> dict[str, Any]:
        """The number of batches so far, and a digest of the data."""
        return {**super().state_dict(), "data": self._data.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError if the data has changed, since the requests would differ from the
        run's."""
        if state.get("data", self._data.digest) != self._data.digest:
            raise ConfigError(f"the data has changed (digest {state['data']}, now {self._data.digest}); put the file back")
        super().load_state_dict(state)


class MixtureRequests(TrainingRequests):
    """The requests for the environments of a `Mixture`. Each has requests of its own, one a
    position; which of them is at a position of the run, `Shares` says. So the number of batches is
    all there is to resume."""

    def __init__(self, task: Mixture, section: RolloutSection, *, seed: int, greedy: bool = False, **settings: Any) -> None:
        super().__init__(task, section, seed=seed, greedy=greedy, **settings)
        self._names, self._shares = list(task.sources), task.share_positions(section.prompts)
        self._own = {
            name: make_training_requests(
                source.task, replace(source.recipe.rollout, prompts=1), seed=Random(f"{seed} {name}").getrandbits(32)
            )
            for name, source in task.sources.items()
        }
        self._strategy = _GroupsByEnvironment(
            {name: GRPORequestStrategy(source.recipe.rollout.group_size, greedy) for name, source in task.sources.items()}
        )

    def begin_batch(self, number: int, oldest: int | None = None) -> None:
        for requests in self._own.values():
            requests.begin_batch(number)

    def list_problems(self, number: int) -> list[RolloutRequest]:
        first = number * self._section.prompts
        return [self._request_at(position) for position in range(first, first + self._section.prompts)]

    def _request_at(self, position: int) -> RolloutRequest:
        source, place = self._shares.at(position)
        name = self._names[source]
        [request] = self._own[name].list_problems(place)
        problem = tag(name, request.env.kwargs["problem"])
        return replace(
            request,
            env=replace(request.env, kwargs={"problem": problem}),
            protocol=replace(request.protocol, kwargs={"environment": name}),
            meta={**request.meta, "problem_id": problem["id"], ENVIRONMENT: name},
        )

    def state_dict(self) -> dict[str, Any]:
        """The number of batches so far, and digests of the data."""
        return {**super().state_dict(), "environments": {name: each.state_dict() for name, each in self._own.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError if the data of an environment has changed."""
        for name, own in state.get("environments", {}).items():
            self._own[name].load_state_dict(own)
        super().load_state_dict(state)


@dataclass(frozen=True)
class _GroupsByEnvironment:
    """Groups of the size of each environment."""

    strategies: Mapping[str, RequestStrategy]

    def expand(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        return [member for each in requests for member in self.strategies[each.meta[ENVIRONMENT]].expand([each])]


def make_training_requests(task: Task | EpisodicTask, section: RolloutSection, **settings: Any) -> TrainingRequests:
    """The requests for a task: draws if it generates problems, passes if it has a list of them, and
    for a `Mixture` its environments in turn.
    `settings` are arguments of `TrainingRequests`: `seed`, `info_seed`, `greedy`."""
    played = as_episodic(task)
    problems = played.problem_list
    if isinstance(played, Mixture):
        return MixtureRequests(played, section, **settings)
    if problems is None:
        return TrainingRequests(played, section, **settings)
    return PassRequests(played, problems, section, **settings)


LOGGED_BYTES, FAILED_BYTES = "logged_bytes", "failed_bytes"
"""Keys of the state."""


class BatchLogs:
    """The logs of the episodes of some batches, and of the failed episodes of all."""

    def __init__(self, directory: RunDirectory) -> None:
        self._paths = {LOGGED_BYTES: directory.rollouts, FAILED_BYTES: directory.failed_episodes}

    def state_dict(self) -> dict[str, Any]:
        """The sizes in bytes."""
        return {key: measure_log(path) for key, path in self._paths.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut the logs back to their sizes in `state`, which may have more keys. One whose size is
        not in it, of an older version, stays as it is. Raises ConfigError for a size that is not a
        whole number."""
        sizes = {key: check_number(key, state[key]) for key in self._paths if key in state}
        for key, size in sizes.items():
            truncate_log(self._paths[key], size)


def describe_over_sampling(recipe: Recipe) -> str:
    """One line of output that says how old samples can be, as a consequence of over-sampling."""
    section, lag = recipe.rollout, choose_lag(recipe)
    replaced = f"problems that {section.group_filter} rejects are replaced" if section.group_filter else ""
    oldest = f"answers are up to {lag + max(1, recipe.trainer.sync_every_steps) - 1} policy versions old" if lag else ""
    return f"Groups: {', '.join(part for part in (replaced, oldest) if part)}"


class RequestsByProblem:
    """The requests of a run, one problem at a time. Position p is problem p % prompts of batch p //
    prompts, in batches as they are without over-sampling."""

    def __init__(self, requests: TrainingRequests, prompts: int) -> None:
        self._requests, self._prompts = requests, prompts
        self._next = 0
        self._batch: tuple[int, list[RolloutRequest]] = (-1, [])

    def take(self) -> tuple[int, RolloutRequest]:
        self._next += 1
        return self._next - 1, self.at(self._next - 1)

    def at(self, position: int) -> RolloutRequest:
        number, offset = divmod(position, self._prompts)
        if number != self._batch[0]:
            self._batch = number, self._requests.list_problems(number)
        return self._batch[1][offset]

    def state_dict(self) -> dict[str, Any]:
        """The position, and a digest of the data if there is one."""
        return {**self._requests.state_dict(), "position": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError if the data has changed."""
        position = check_number("the position of the requests", state.get("position"))
        self._requests.load_state_dict(state)
        self._next, self._batch = position, (-1, [])


class OverSampledRollouts(RollingBatchSource):
    """A `RollingBatchSource` with the settings of a recipe, which writes the rollouts of every
    `rollout.log_every`-th batch to the log in the run's folder. A batch's meta has its number.

    Batches that are trained again after a resume replace their lines in the logs."""

    def __init__(
        self,
        recipe: Recipe,
        engine: RolloutEngine,
        requests: TrainingRequests,
        credit: CreditAssigner,
        *,
        max_steps: int,
        directory: RunDirectory,
    ) -> None:
        section = recipe.rollout
        self._requests, self._logs = requests, BatchLogs(directory)
        super().__init__(
            engine=engine,
            requests=RequestsByProblem(requests, section.prompts),
            groups_per_batch=section.prompts,
            group_size=section.group_size,
            credit_assigner=credit,
            over_sampling_factor=section.over_sampling_factor,
            max_lag=section.max_lag,
            order=section.order,
            group_filter=build_group_filter(recipe),
            max_steps=max_steps,
            concurrency=section.concurrency,
            patience=section.patience,
            outage_patience_s=section.outage_patience_s,
            seed=recipe.seed,
            on_rollouts=RolloutLog(directory.rollouts, section.log_every).write,
        )

    async def next_batch(self) -> SAWBatch:
        number = self.num_batches
        self._requests.begin_batch(number, self._pool.ledger.oldest_position())
        batch = await super().next_batch()
        batch.meta |= {BATCH_NUMBER: number, **self._requests.metrics}
        return batch

    def _accept(self, group: Group) -> bool:
        is_accepted = super()._accept(group)
        self._requests.observe(group.members[0])
        return is_accepted

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._logs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key not in (LOGGED_BYTES, FAILED_BYTES)})
        self._logs.load_state_dict(state)
