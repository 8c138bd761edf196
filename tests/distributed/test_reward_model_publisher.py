"""Publishing a reward model: the weights that training changed, and no unannounced ones."""

import asyncio

import pytest
import torch
from reward_models import reward_model

from ludic.distributed import PolicyPublisher, Rank0OnlyPublisher, RMPublisherAdapter, create_rm_publisher
from ludic.errors import ConfigError
from ludic.inference import LocalRewardModel, RewardModelTrainingMode

WEIGHTS = {"model.norm.weight": torch.ones(2), "score.weight": torch.zeros(1, 2)}


class Receiver:
    """Fails like a receiver that filters tensors itself: it waits for one that never comes."""

    def __init__(self):
        self.got = []

    def sync_reward_weights(self, params, *, training_mode, version=None):
        expected = {"score.weight"} if training_mode is RewardModelTrainingMode.HEAD_ONLY else set(WEIGHTS)
        if set(params) != expected:
            raise TimeoutError(f"waited for {expected}, was sent {set(params)}")
        self.got.append((sorted(params), training_mode, version))


@pytest.mark.parametrize("mode", ["head_only", "full"])
def test_sender_and_receiver_select_the_same_weights(mode):
    receiver = Receiver()
    create_rm_publisher(receiver, training_mode=mode).publish(WEIGHTS, version=3)
    names = ["score.weight"] if mode == "head_only" else ["model.norm.weight", "score.weight"]
    assert receiver.got == [(names, RewardModelTrainingMode(mode), 3)]


def test_the_default_sends_everything():
    receiver = Receiver()
    publisher = create_rm_publisher(receiver)
    publisher.publish(WEIGHTS)
    assert receiver.got == [(sorted(WEIGHTS), RewardModelTrainingMode.FULL, None)]
    assert isinstance(publisher, PolicyPublisher)
    assert isinstance(publisher, RMPublisherAdapter)


def test_with_rank0_only_creating_the_publisher_does_not_call_the_client(monkeypatch):
    publisher = create_rm_publisher(object(), rank0_only=True)
    assert isinstance(publisher, Rank0OnlyPublisher)
    monkeypatch.setattr("torch.distributed.is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    publisher.publish(WEIGHTS)


def test_a_training_mode_that_selects_no_weights_is_an_error():
    with pytest.raises(ConfigError, match="head_only"):
        create_rm_publisher(Receiver(), training_mode="head_only").publish({"model.norm.weight": torch.ones(2)})
    with pytest.raises(ValueError, match="half"):
        create_rm_publisher(Receiver(), training_mode="half")


def test_debug_logging_names_the_weights_that_are_sent(caplog):
    with caplog.at_level("INFO"):
        create_rm_publisher(Receiver(), training_mode="head_only", debug=True).publish(WEIGHTS)
    assert "leaving out 1: score.weight" in caplog.text


def test_a_model_in_this_process_scores_with_the_published_head():
    client, other = LocalRewardModel(reward_model(seed=6)), reward_model(seed=7)
    create_rm_publisher(client, training_mode="head_only").publish(dict(other.named_parameters()), version=2)
    assert torch.equal(client.model.score.weight, other.score.weight)
    assert not torch.equal(client.model.model.embed_tokens.weight, other.model.embed_tokens.weight)
    assert asyncio.run(client.get_reward_model_version()) == 2
