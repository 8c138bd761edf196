"""Publishes the weights of a reward model to the clients that score with it."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from ludic.distributed.publisher import Rank0OnlyPublisher
from ludic.inference.client import Publisher, Version, Weights
from ludic.inference.reward_types import RewardModelTrainingMode, select_trained_weights

logger = logging.getLogger(__name__)


class RewardWeightsClient(Protocol):
    """A client of a reward model that takes new weights: `LocalRewardModel`, `VLLMScoringClient`,
    `VLLMClient`."""

    def sync_reward_weights(
        self,
        params: Weights,
        *,
        training_mode: RewardModelTrainingMode = RewardModelTrainingMode.FULL,
        version: str | int | None = None,
    ) -> Any: ...


class RMPublisherAdapter(Publisher):
    """Sends only the weights that `training_mode` changes. They are selected before anything is
    announced, so that the receiver never waits for a tensor that is not sent. `debug` logs their
    names."""

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

    def publish(self, state_dict: Weights, version: Version = None) -> None:
        """Raises ConfigError if `training_mode` changes none of the weights."""
        selected = select_trained_weights(state_dict, self.training_mode)
        if self.debug:
            left_out = len(state_dict) - len(selected)
            logger.info("publishing %d weights, leaving out %d: %s", len(selected), left_out, ", ".join(sorted(selected)))
        self.client.sync_reward_weights(selected, training_mode=self.training_mode, version=version)


def create_rm_publisher(
    client: RewardWeightsClient,
    *,
    training_mode: RewardModelTrainingMode | str = RewardModelTrainingMode.FULL,
    debug: bool = False,
    rank0_only: bool = False,
) -> Publisher:
    """A publisher for `RMTrainer`. With `rank0_only`, only rank 0 uses the client, from the first
    push on."""
    mode = RewardModelTrainingMode(training_mode)
    if rank0_only:
        return Rank0OnlyPublisher(lambda: RMPublisherAdapter(client, training_mode=mode, debug=debug))
    return RMPublisherAdapter(client, training_mode=mode, debug=debug)
