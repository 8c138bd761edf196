"""The rollout side of a recipe: requests, the engine with its agent and environment, and what is asked of the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs.tasks import Problem, Task
from ludic.errors import ConfigError
from ludic.inference import ChatClient, InferenceSpec, ReturnSpec, SamplingParams
from ludic.inference.local_sampler import check_sampling
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import ParseResult
from ludic.recipes.schema import Recipe, RolloutSection
from ludic.training.batching.intra_batch_control import GRPORequestStrategy
from ludic.training.batching.rollout_engine import RolloutEngine
from ludic.training.batching.synced_batching import RolloutBatchSource
from ludic.training.types import EnvSpec, ProtocolSpec, RolloutRequest, SAWBatch

ENV_KIND, PROTOCOL_KIND = "task", "single_agent"


def verbatim(text: str) -> ParseResult:
    """The whole completion is the action."""
    return ParseResult(action=text, reward=0.0, obs=None)


def make_engine(
    task: Task,
    client: ChatClient,
    *,
    model_name: str,
    system_prompt: str | None,
    jsonl_path: Path | None = None,
    **settings: Any,
) -> RolloutEngine:
    """One answer a problem. An answer cut off at the token limit never reaches the environment and earns 0.

    `settings` are more of the engine's own, such as `max_retries`.
    """

    def make_protocol() -> SingleAgentProtocol:
        agent = Agent(
            client=client,
            model=model_name,
            ctx=FullDialog(system_prompt=system_prompt),
            parser=verbatim,
            incomplete_completion_penalty=0.0,
        )
        return SingleAgentProtocol(agent=agent)

    return RolloutEngine(
        env_registry={ENV_KIND: lambda problem: task.make_env(problem)},
        protocol_registry={PROTOCOL_KIND: make_protocol},
        jsonl_path=jsonl_path,
        **settings,
    )


def check_rollouts(recipe: Recipe, task: Task) -> None:
    """Raise `ConfigError` for settings that the sampler or the algorithm would refuse once the warm-up is over."""
    check_sampling(training_inference(recipe.rollout, task).sampling)
    group_size = recipe.algorithm_args.get("group_size", recipe.rollout.group_size)
    if group_size != recipe.rollout.group_size:
        raise ConfigError(
            f"algorithm_args.group_size ({group_size}) must be rollout.group_size ({recipe.rollout.group_size}); set that one alone"
        )


def request_for(problem: Problem, *, inference: InferenceSpec, seed: int, **meta: Any) -> RolloutRequest:
    """One episode on `problem`."""
    return RolloutRequest(
        env=EnvSpec(kind=ENV_KIND, kwargs={"problem": problem}),
        protocol=ProtocolSpec(kind=PROTOCOL_KIND),
        env_seed=seed,
        sampling_seed=seed,
        inference=inference,
        meta={"problem_id": problem["id"], **meta},
    )


def training_inference(section: RolloutSection, task: Task) -> InferenceSpec:
    """What training samples with: the log-probabilities come back with the tokens."""
    return InferenceSpec(sampling=_sampling(section, task, section.temperature, section.top_p), return_=ReturnSpec.for_rl())


def evaluation_inference(section: RolloutSection, task: Task, *, greedy: bool) -> InferenceSpec:
    """The same distribution as in training, or its mode."""
    temperature, top_p = (0.0, 1.0) if greedy else (section.temperature, section.top_p)
    return InferenceSpec(sampling=_sampling(section, task, temperature, top_p), return_=ReturnSpec.for_eval())


def _sampling(section: RolloutSection, task: Task, temperature: float, top_p: float) -> SamplingParams:
    max_tokens = section.max_new_tokens or task.max_new_tokens
    return SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens)


class OccasionallyLogged:
    """Two sources over the same requests: every `every`-th batch comes from `logged`, which writes its rollouts down; 0 is never.

    Its state is that of the requests.
    """

    def __init__(self, plain: RolloutBatchSource, logged: RolloutBatchSource, requests: TrainingRequests, *, every: int) -> None:
        self._plain, self._logged, self._requests, self._every = plain, logged, requests, every

    async def next_batch(self) -> SAWBatch:
        due = self._every > 0 and self._requests.batches % self._every == 0
        return await (self._logged if due else self._plain).next_batch()

    def state_dict(self) -> dict[str, int]:
        return self._requests.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._requests.load_state_dict(state)


class TrainingRequests:
    """The requests of one batch: `prompts` problems, `group_size` answers to each. Batch `k` depends on the seed and `k` only."""

    def __init__(self, task: Task, section: RolloutSection, *, seed: int) -> None:
        self._task, self._section, self._seed = task, section, seed
        self._inference = training_inference(section, task)
        self._strategy = GRPORequestStrategy(group_size=section.group_size)
        self.batches = 0

    def __call__(self) -> Sequence[RolloutRequest]:
        rng = Random(f"rollouts {self._seed} {self.batches}")
        self.batches += 1
        return self._strategy.expand([self._one(rng) for _ in range(self._section.prompts)])

    def _one(self, rng: Random) -> RolloutRequest:
        return request_for(self._task.draw(rng), inference=self._inference, seed=rng.randrange(2**31))

    def state_dict(self) -> dict[str, int]:
        """Batches asked for so far."""
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches = int(state["batches"])
