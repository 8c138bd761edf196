"""Publishing: tensors are announced, sent and finalised in order, on rank 0 only."""

import pytest
import torch
import torch.distributed
from gathered import Gathered
from playing import ScriptedClient, tiny_model, tokenizer

from ludic.distributed import (
    BroadcastPolicyPublisher,
    ControlPlane,
    LocalPublisher,
    PolicyPublisher,
    Rank0OnlyPublisher,
    TensorCommunicator,
)
from ludic.errors import ConfigError
from ludic.inference import LocalChatClient
from ludic.inference.client import Publisher, as_publisher
from ludic.models.published import published_weights


class Recorder:
    rank = 3

    def __init__(self):
        self.calls = []

    def announce_update_batch(self, metadata, version=None):
        self.calls.append(("announce", [(m["name"], m["dtype"], list(m["shape"])) for m in metadata], version))

    def finalize_update(self, version=None):
        self.calls.append(("finalize", version))

    def broadcast(self, tensor, src):
        assert tensor.is_contiguous()
        self.calls.append(("broadcast", tuple(tensor.shape), src))

    def barrier(self):
        self.calls.append(("barrier",))

    def publish(self, state_dict, version=None):
        self.calls.append(("publish", sorted(state_dict), version))


def test_tensors_are_announced_broadcast_by_name_and_finalised_with_their_version():
    both = Recorder()
    assert isinstance(both, ControlPlane)
    assert isinstance(both, TensorCommunicator)
    weights = {"b": torch.zeros(2, 3).T, "a": torch.zeros(4, dtype=torch.bfloat16)}
    BroadcastPolicyPublisher(both, both, src_rank=3).publish(weights, version=5)
    assert both.calls == [
        ("announce", [("a", "torch.bfloat16", [4]), ("b", "torch.float32", [3, 2])], 5),
        ("broadcast", (4,), 3),
        ("broadcast", (3, 2), 3),
        ("barrier",),
        ("finalize", 5),
    ]


def test_a_publisher_without_a_stream_gets_the_collected_weights():
    class Plain:
        def publish(self, state_dict, version=None):
            self.got = state_dict, version

    plain, pairs = Plain(), [("a", torch.ones(2)), ("b", torch.zeros(1))]
    as_publisher(plain).publish_stream(pairs, version=4)
    assert plain.got == (dict(pairs), 4)


def test_only_rank_zero_creates_and_uses_the_publisher(monkeypatch):
    made = []

    def make():
        made.append(Recorder())
        return made[-1]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    publisher = Rank0OnlyPublisher(make)
    assert isinstance(publisher, PolicyPublisher)
    publisher.publish({}, 1)
    assert made == []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    publisher.publish({}, 2)
    publisher.publish({}, 3)
    assert [recorder.calls for recorder in made] == [[("publish", [], 2), ("publish", [], 3)]]
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    Rank0OnlyPublisher(make, enabled=False).publish({}, 4)
    assert made[-1].calls == [("publish", [], 4)]


def test_without_a_process_group_this_process_is_rank_zero():
    recorder = Recorder()
    Rank0OnlyPublisher(lambda: recorder).publish({"w": torch.zeros(1)}, 1)
    assert recorder.calls == [("publish", ["w"], 1)]


def test_rank_zero_forwards_every_call_to_the_inner_publisher():
    calls = []

    class Inner(Publisher):
        timings = {"transfer_s": 0.5}  # noqa: RUF012  read only

        def expect_change(self, expected):
            calls.append(expected)

        def publish(self, state_dict, version=None):
            calls.append(version)

        def close(self):
            calls.append("closed")

    publisher = Rank0OnlyPublisher(Inner)
    publisher.close()
    publisher.expect_change(False)
    assert (calls, publisher.timings) == ([], {})
    publisher.publish({}, 1)
    publisher.close()
    assert calls == [False, 1, "closed"]
    assert publisher.timings == {"transfer_s": 0.5}


def test_the_local_publisher_passes_weights_to_its_client():
    class Taking(ScriptedClient):
        def sync_weights(self, params, *, timeout_s, version):
            self.got = (sorted(params), timeout_s, version)

    client = Taking("a")
    LocalPublisher(client, timeout_s=2.0).publish({"w": torch.zeros(1)}, version=8)
    assert client.got == (["w"], 2.0, 8)


def test_the_local_publisher_copies_gathered_weights_one_by_one():
    model, trained = tiny_model(0), published_weights(tiny_model(1))
    client, source = LocalChatClient(model, tokenizer()), Gathered(trained)
    LocalPublisher(client).publish_stream(source, version=8)
    assert source.gathered == list(trained)
    assert all(torch.equal(value, trained[name]) for name, value in model.named_parameters())
    assert client.sync_weights({}) == "9"  # the version after 8


def test_gathered_weights_of_another_model_are_refused_before_the_first_is_copied():
    model = tiny_model(0)
    before = {name: value.clone() for name, value in model.named_parameters()}
    source = Gathered({**published_weights(tiny_model(1)), "zebra": torch.zeros(1)})
    with pytest.raises(ConfigError, match="the model has no weight 'zebra'"):
        LocalPublisher(LocalChatClient(model, tokenizer())).publish_stream(source, version=8)
    assert source.gathered == []
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_the_local_publisher_collects_for_a_client_of_another_kind():
    class Taking(ScriptedClient):
        def sync_weights(self, params, *, timeout_s, version):
            self.got = (sorted(params), version)

    client = Taking("a")
    LocalPublisher(client).publish_stream(Gathered({"w": torch.zeros(1)}), version=8)
    assert client.got == (["w"], 8)
