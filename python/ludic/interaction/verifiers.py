"""Episodes that verifiers plays itself, with a client of ours in the model's seat."""

from __future__ import annotations

from ludic.envs.adapters.verifiers import VerifiersEnv
from ludic.envs.adapters.verifiers_seat import ModelSeat, play_task
from ludic.envs.adapters.verifiers_trace import rollout_from_trace
from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError
from ludic.inference.client import ChatClient
from ludic.inference.request import InferenceSpec, ReturnSpec
from ludic.interaction.base import InteractionProtocol
from ludic.seeds import derived_seed
from ludic.types import Rollout


class VerifiersProtocol(InteractionProtocol):
    """Plays a task of a `VerifiersEnv` as verifiers would, harness, tools and scoring included, and
    makes a rollout of the trace.

    The tokens are those that `client` sampled. `max_steps` bounds the calls of the model; an
    episode that verifiers reports as failed is a RolloutError, never a reward.
    """

    def __init__(self, client: ChatClient, *, model: str = "policy") -> None:
        self._client = client
        self._model = model

    async def run(
        self,
        *,
        env: LudicEnv[str, str, str],
        max_steps: int,
        env_seed: int | None = None,
        sampling_seed: int | None = None,
        inference: InferenceSpec | None = None,
        timeout_s: float | None = None,
    ) -> list[Rollout]:
        """`inference` asks for token ids and log-probabilities when it is left out."""
        if not isinstance(env, VerifiersEnv):
            raise ConfigError(f"VerifiersProtocol plays a VerifiersEnv, not a {type(env).__name__}")
        spec = inference or InferenceSpec(return_=ReturnSpec.for_rl())
        seat = ModelSeat(self._client, spec, lambda call: derived_seed(sampling_seed, call), timeout_s)
        trace = await play_task(env.task(env_seed), seat, env.agent, model=self._model, max_turns=max_steps)
        return [rollout_from_trace(trace)]
