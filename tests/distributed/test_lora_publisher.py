"""Publishing adapters: each version has its own name and is on all servers or on none."""

import copy
import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from stub_weight_server import Refused, refuse
from tiny_policy import make_tiny_policy

from ludic.distributed import create_lora_publisher
from ludic.errors import ConfigError, PublishError
from ludic.models.lora import LoraSettings, apply_lora, collect_adapter_weights

BASE = make_tiny_policy()


@pytest.fixture
def model():
    return apply_lora(copy.deepcopy(BASE), LoraSettings(rank=2))


def step(model, by=0.1):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(by)


def test_each_version_has_its_own_name_and_old_ones_are_unloaded(start, model, tmp_path):
    servers = [start(), start()]
    versions = []
    client = SimpleNamespace(
        server_urls=[server.url for server in servers],
        served_names={},
        weights_changed=lambda version, lost: versions.append(version),
    )
    publisher = create_lora_publisher(client, model, directory=tmp_path / "adapters")
    for version in (1, 2, 3):
        step(model)
        publisher.publish({}, version=version)
        assert client.served_names == {"policy": f"policy@{version}"}
    for server in servers:
        assert list(server.adapters) == ["policy@2", "policy@3"]
        assert server.version == "3"
    assert versions == [1, 2, 3]
    folder = tmp_path / "adapters" / "version_3"
    assert servers[0].adapters["policy@3"] == str(folder)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2
    stored = load_file(folder / "adapter_model.safetensors")
    assert stored.keys() == collect_adapter_weights(model).keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in collect_adapter_weights(model).items())


def test_if_one_server_cannot_load_a_version_none_keeps_it(start, model, tmp_path):
    servers = [start(), start()]
    publisher = create_lora_publisher([server.url for server in servers], model, directory=tmp_path)
    publisher.publish({}, version=1)
    step(model)
    servers[1].faults["/v1/load_lora_adapter"] = refuse("LoRA rank 2 is greater than max_lora_rank", status=400)
    with pytest.raises(PublishError, match=r"servers keep policy@1.*--max-lora-rank"):
        publisher.publish({}, version=2)
    assert [list(server.adapters) for server in servers] == [["policy@1"]] * 2
    assert publisher.served_name == "policy@1"
    servers[1].faults.clear()
    publisher.publish({}, version=2)
    assert [list(server.adapters) for server in servers] == [["policy@1", "policy@2"]] * 2


def test_unchanged_adapters_stay_loaded_and_a_version_can_be_repeated(start, model, tmp_path, caplog):
    server = start()
    publisher = create_lora_publisher(server.url, model, directory=tmp_path)
    publisher.publish({}, version=1)
    publisher.publish({}, version=1)
    publisher.publish({}, version=2)
    assert (list(server.adapters), publisher.served_name, server.version) == (["policy@1"], "policy@1", "2")
    assert re.search("adapters of version 2 equal .*version 1", caplog.text)
    server.adapters.clear()  # it was restarted
    publisher.publish({}, version=3)
    assert (list(server.adapters), publisher.served_name) == (["policy@3"], "policy@3")
    for version in range(4, 21):
        publisher.publish({}, version=version)
    with pytest.raises(PublishError, match=r"20 pushes .*version 21, .*the adapters"):
        publisher.publish({}, version=21)
    with pytest.raises(ConfigError, match="needs a version"):
        publisher.publish({})


def test_a_server_that_was_restarted_gets_the_next_version(start, model, tmp_path, caplog):
    server = start()
    publisher = create_lora_publisher(server.url, model, directory=tmp_path, keep=1)
    publisher.publish({}, version=1)
    server.adapters.clear()
    step(model)
    publisher.publish({}, version=2)
    assert list(server.adapters) == ["policy@2"]
    assert "policy@1 was not unloaded on all servers" in caplog.text


def test_a_resumed_run_replaces_the_version_of_the_previous_run(start, model, tmp_path):
    """The servers were not restarted and refuse to load a name that is already loaded."""
    server = start()
    create_lora_publisher(server.url, model, directory=tmp_path / "before").publish({}, version=4)
    resumed = create_lora_publisher(server.url, model, directory=tmp_path / "after")
    resumed.publish({}, version=4)
    assert server.adapters == {"policy@4": str(tmp_path / "after" / "version_4")}


def test_loaded_adapters_are_queried_at_the_first_push_and_after_a_fault(start, model, tmp_path):
    server = start()
    publisher = create_lora_publisher(server.url, model, directory=tmp_path)
    listings = []

    def push(version):
        step(model)
        publisher.publish({}, version=version)
        listings.append(server.paths().count("/v1/models"))

    for version in (1, 2, 3):
        push(version)

    def lost(body):
        server.on_v1_load_lora_adapter({}, body)
        raise Refused(500, "the answer is lost")

    server.faults["/v1/load_lora_adapter"] = lost
    server.faults["/v1/unload_lora_adapter"] = refuse("nor can it be taken back")
    with pytest.raises(PublishError, match="the answer is lost"):
        push(4)
    server.faults.clear()
    assert "policy@4" in server.adapters
    push(4)
    push(5)
    server.adapters.clear()  # it was restarted, which the publisher notices when it unloads an old version
    push(6)
    push(7)
    push(8)
    assert listings == [1, 1, 1, 2, 2, 2, 3, 4]
    assert server.adapters.keys() >= {"policy@7", "policy@8"}


def test_a_sharded_model_is_refused_with_what_publishes_it(model, tmp_path):
    model.set_requires_gradient_sync = None  # as `fully_shard` leaves it
    with pytest.raises(ConfigError, match=r"publish merged weights \(create_vllm_publisher\)"):
        create_lora_publisher(None, model, directory=tmp_path)
