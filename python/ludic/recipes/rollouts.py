"""The rollout side of a recipe: requests, the engine with its agent and environment, and what is asked of the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs.tasks import Episode, EpisodicTask
from ludic.inference import ChatClient, InferenceSpec, ReturnSpec, SamplingParams
from ludic.interaction import SingleAgentProtocol
from ludic.recipes.schema import RolloutSection
from ludic.training.batching.intra_batch_control import GRPORequestStrategy
from ludic.training.batching.rollout_engine import RolloutEngine
from ludic.training.batching.synced_batching import RolloutBatchSource
from ludic.training.types import EnvSpec, ProtocolSpec, RolloutRequest, SAWBatch

ENV_KIND, PROTOCOL_KIND = "task", "single_agent"


def make_engine(
    task: EpisodicTask, client: ChatClient, *, model_name: str, system_prompt: str | None, jsonl_path: Path | None = None
) -> RolloutEngine:
    """An action cut off at the token limit never reaches the environment and earns what the task says, as does one that the task's
    parser refuses; either ends an episode of several turns."""

    def make_protocol() -> SingleAgentProtocol:
        agent = Agent(
            client=client,
            model=model_name,
            ctx=FullDialog(system_prompt=system_prompt),
            parser=task.parser,
            incomplete_completion_penalty=task.cut_off_reward,
        )
        return SingleAgentProtocol(agent=agent, stop_on_parse_error=task.max_turns > 1)

    return RolloutEngine(
        env_registry={ENV_KIND: lambda problem: task.make_env(problem)},
        protocol_registry={PROTOCOL_KIND: make_protocol},
        jsonl_path=jsonl_path,
    )


def request_for(problem: Episode, *, inference: InferenceSpec, seed: int, **meta: Any) -> RolloutRequest:
    """One episode on `problem`."""
    return RolloutRequest(
        env=EnvSpec(kind=ENV_KIND, kwargs={"problem": problem}),
        protocol=ProtocolSpec(kind=PROTOCOL_KIND),
        env_seed=seed,
        sampling_seed=seed,
        inference=inference,
        meta={"problem_id": problem["id"], **meta},
    )


def training_inference(section: RolloutSection, task: EpisodicTask) -> InferenceSpec:
    """What training samples with: the log-probabilities come back with the tokens."""
    return InferenceSpec(sampling=_sampling(section, task, section.temperature, section.top_p), return_=ReturnSpec.for_rl())


def evaluation_inference(section: RolloutSection, task: EpisodicTask, *, greedy: bool) -> InferenceSpec:
    """The same distribution as in training, or its mode."""
    temperature, top_p = (0.0, 1.0) if greedy else (section.temperature, section.top_p)
    return InferenceSpec(sampling=_sampling(section, task, temperature, top_p), return_=ReturnSpec.for_eval())


def _sampling(section: RolloutSection, task: EpisodicTask, temperature: float, top_p: float) -> SamplingParams:
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
    """The requests of one batch: `prompts` problems, `group_size` episodes on each. Batch `k` depends on the seed and `k` only."""

    def __init__(self, task: EpisodicTask, section: RolloutSection, *, seed: int) -> None:
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
