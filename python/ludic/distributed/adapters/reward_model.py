"""Publishes a reward model's weights to those who score with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ludic.distributed.interfaces import PolicyPublisher
from ludic.distributed.publisher import Rank0OnlyPublisher
from ludic.inference.reward_types import RewardModelTrainingMode
from ludic.inference.reward_weights import trained_weights

if TYPE_CHECKING:
    from torch import Tensor

    from ludic.inference.vllm_scoring import VLLMScoringClient

logger = logging.getLogger(__name__)


class RewardWeightsClient(Protocol):
    """A reward model that takes new weights: `LocalRewardModel`, `VLLMScoringClient`, `VLLMClient`."""

    def sync_reward_weights(
        self,
        params: Mapping[str, Tensor],
        *,
        training_mode: RewardModelTrainingMode = RewardModelTrainingMode.FULL,
        version: str | int | None = None,
    ) -> Any: ...


class RMPublisherAdapter:
    """Sends the weights that `training_mode` changes, and nothing else: what is left out is left out here, before anything is announced,
    so that the receiver never waits for a tensor that does not come. `debug` logs the names."""

    def __init__(
        self,
        client: RewardWeightsClient,
        *,
        training_mode: RewardModelTrainingMode | str = RewardModelTrainingMode.FULL,
        debug: bool = False,
    ) -> None:
        self.client = client
        self.training_mode = RewardModelTrainingMode(training_mode)
        self.debug = debug

    def publish(self, state_dict: Mapping[str, Tensor], version: str | int | None = None) -> None:
        """Raises ConfigError where `training_mode` changes none of the weights."""
        chosen = trained_weights(state_dict, self.training_mode)
        if self.debug:
            left_out = len(state_dict) - len(chosen)
            logger.info("publishing %d weights, leaving out %d: %s", len(chosen), left_out, ", ".join(sorted(chosen)))
        self.client.sync_reward_weights(chosen, training_mode=self.training_mode, version=version)


class ScoringServerSender:
    """Pushes weights to the servers of a `VLLMScoringClient` while they serve, as `create_vllm_publisher` does. They are reached at the
    first push."""

    def __init__(self, client: VLLMScoringClient, *, partial: bool, **transport: Any) -> None:
        """`partial`: weights that were not trained are not sent. `transport`: directory, master_address and timeout_s of
        `create_vllm_publisher`."""
        self._client, self._partial, self._transport = client, partial, transport
        self._publisher: Any = None

    def send(self, params: Mapping[str, Tensor], *, version: str | int | None, timeout_s: float) -> str:
        """Returns the version now served. A transfer takes at most the `timeout_s` of the constructor, or this one if it is shorter."""
        from ludic.distributed.adapters.vllm import create_vllm_publisher

        if self._publisher is None:
            limits = {**self._transport, "timeout_s": min(timeout_s, self._transport.get("timeout_s", timeout_s))}
            self._publisher = create_vllm_publisher(self._client.urls, partial=self._partial, allow_unchanged=True, **limits)
        served = f"sync-{time.time_ns()}" if version is None else str(version)
        self._publisher.publish(params, version=served)
        return served

    def close(self) -> None:
        """Leave the servers, which keep their weights."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.inner.control.close()


def create_rm_publisher(
    client: RewardWeightsClient,
    *,
    training_mode: RewardModelTrainingMode | str = RewardModelTrainingMode.FULL,
    debug: bool = False,
    rank0_only: bool = False,
    directory: str | Path | None = None,
    master_address: str = "127.0.0.1",
    timeout_s: float = 60.0,
) -> PolicyPublisher:
    """A publisher for `RMTrainer`.

    Where `client` scores at vLLM servers and has nothing yet to push weights with, it is given that: `directory`, `master_address` and
    `timeout_s` are `create_vllm_publisher`'s. With `rank0_only` the client is first touched when rank 0 publishes, and by no other rank.
    """
    mode = RewardModelTrainingMode(training_mode)

    def make() -> PolicyPublisher:
        partial = mode is not RewardModelTrainingMode.FULL
        _connect(client, partial=partial, directory=directory, master_address=master_address, timeout_s=timeout_s)
        return RMPublisherAdapter(client, training_mode=mode, debug=debug)

    return Rank0OnlyPublisher(make) if rank0_only else make()


def _connect(client: Any, **settings: Any) -> None:
    """Give a client of scoring servers what it pushes with."""
    from ludic.inference.vllm_scoring import VLLMScoringClient

    scoring = getattr(client, "scoring", client)
    if isinstance(scoring, VLLMScoringClient) and not scoring.can_push:
        scoring.connect_weights(ScoringServerSender(scoring, **settings))
