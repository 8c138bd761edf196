"""Plays episodes with the library verifiers itself, with one of our chat clients as the model."""

from __future__ import annotations

from ludic.envs.adapters.verifiers import VerifiersClient, VerifiersEnv, play_task
from ludic.envs.adapters.verifiers_rollouts import rollout_from_trace
from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError
from ludic.inference.client import ChatClient
from ludic.inference.request import InferenceSpec, ReturnSpec, derive_seed
from ludic.interaction.single_agent import InteractionProtocol
from ludic.types import Rollout


class VerifiersProtocol(InteractionProtocol):
    """Plays a task of a `VerifiersEnv` with verifiers' own harness, tools and scoring, and converts
    the trace to a rollout.

    The tokens are those that `client` sampled. `max_steps` bounds the number of model calls. An
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
        """Without `inference`, token ids and log-probabilities are requested."""
        if not isinstance(env, VerifiersEnv):
            raise ConfigError(f"VerifiersProtocol plays a VerifiersEnv, not a {type(env).__name__}")
        spec = inference or InferenceSpec(return_=ReturnSpec.for_rl())
        policy_client = VerifiersClient(self._client, spec, lambda call: derive_seed(sampling_seed, call), timeout_s)
        trace = await play_task(env.task(env_seed), policy_client, env.agent, model=self._model, max_turns=max_steps)
        return [rollout_from_trace(trace)]
