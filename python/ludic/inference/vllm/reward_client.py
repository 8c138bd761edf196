"""One client for a policy and a reward model behind vLLM servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ludic.errors import check_value
from ludic.inference.client import Weights
from ludic.inference.reward_types import PoolingType, RewardModelTrainingMode, ScoringRequest, ScoringResponse
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.scoring import ANY_MODEL, VLLMScoringClient


class VLLMClient(VLLMChatClient):
    """`VLLMChatClient` for the server at `policy_port`, and scores from the server at
    `scoring_port`.

    Without these two, the server at `port` is used for both; how it was started decides whether it
    can complete or score. `model_name` is the name of the reward model at its server.
    `scoring_tokenizer` and `pooling_type` are arguments of `VLLMScoringClient`; `options` are
    further arguments of `VLLMChatClient`.
    """

    def __init__(
        self,
        *,
        host: str = "0.0.0.0",
        port: int = 8000,
        policy_port: int | None = None,
        scoring_port: int | None = None,
        group_port: int = 51216,
        scoring_group_port: int = 51217,
        connection_timeout_s: float = 60,
        enable_weight_updates: bool = False,
        device: Any = 0,
        model_name: str = ANY_MODEL,
        scoring_tokenizer: Any = None,
        pooling_type: PoolingType = PoolingType.LAST,
        **options: Any,
    ) -> None:
        super().__init__(
            host=host,
            port=port if policy_port is None else policy_port,
            group_port=group_port,
            connection_timeout_s=connection_timeout_s,
            enable_weight_updates=enable_weight_updates,
            device=device,
            **options,
        )
        self.scoring_group_port, self.model_name = scoring_group_port, model_name
        policy_url = self.server_url
        place = policy_url.rpartition(":")[0]
        self._scoring = VLLMScoringClient(
            policy_url if scoring_port is None else f"{place}:{scoring_port}",
            model=model_name,
            tokenizer=scoring_tokenizer,
            pooling_type=pooling_type,
            timeout_s=self._retries.timeout_s,
            max_retries=self._retries.max_retries,
            backoff_s=self._retries.backoff_s,
            api_key=options.get("api_key", "local"),
            publisher_settings=options.get("publisher_settings"),
        )

    @property
    def scoring(self) -> VLLMScoringClient:
        """The client of the scoring server."""
        return self._scoring

    def reads_ids_of(self, tokenizer: Any) -> bool:
        """Whether token ids of this tokenizer mean the same at the scoring server."""
        return self.scoring.reads_ids_of(tokenizer)

    async def score(self, request: ScoringRequest) -> tuple[ScoringResponse, dict[str, Any]]:
        return await self.scoring.score(request)

    async def score_batch(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        normalize: bool = True,
        pooling_type: PoolingType | None = None,
        n_labels: int = 1,
    ) -> list[float]:
        return await self.scoring.score_batch(inputs, normalize=normalize, pooling_type=pooling_type, n_labels=n_labels)

    def score_sync(self, request: ScoringRequest) -> tuple[ScoringResponse, dict[str, Any]]:
        return self.scoring.score_sync(request)

    async def get_reward_model_version(self) -> int:
        return await self.scoring.get_reward_model_version()

    async def get_server_info(self, server: str = "scoring") -> dict[str, Any]:
        """`url`, `models`, `max_model_len` and vLLM's `version` of the `scoring` or the `policy`
        server."""
        check_value("server", server, choices=("scoring", "policy"))
        if server == "scoring":
            return await self.scoring.get_server_info()
        async with VLLMScoringClient(self.server_url, timeout_s=self._retries.timeout_s) as policy:
            return await policy.get_server_info()

    def sync_reward_weights(
        self,
        params: Weights,
        *,
        training_mode: RewardModelTrainingMode | str = RewardModelTrainingMode.FULL,
        timeout_s: float = 600.0,
        version: str | int | None = None,
    ) -> str:
        """Like `VLLMScoringClient.sync_reward_weights`. Raises InferenceError unless the client was
        made with `enable_weight_updates`."""
        self._check_pushes_weights()
        return self.scoring.sync_reward_weights(params, training_mode=training_mode, timeout_s=timeout_s, version=version)

    def close_communicator(self) -> None:
        """Close the connections for pushing weights to either server."""
        super().close_communicator()
        self._scoring.close_communicator()

    async def close_async_session(self) -> None:
        """Close the connections of this event loop to both servers."""
        await self.aclose()

    async def aclose(self) -> None:
        await self._scoring.aclose()
        await super().aclose()
