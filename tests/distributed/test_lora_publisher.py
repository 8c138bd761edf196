"""Publishing adapters: each version has its own name and is on all servers or on none."""

import copy
import json
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save
from stub_weight_server import Refused, refuse, same
from tiny_policy import make_tiny_policy

from ludic.distributed import create_lora_publisher
from ludic.errors import ConfigError, PublishError
from ludic.inference.vllm.in_server.adapter_uploads import AdapterStore
from ludic.models.lora import LoraSettings, apply_lora, collect_adapter_weights, save_adapter
from ludic.models.published import published_weights

BASE = make_tiny_policy()


@pytest.fixture
def model():
    return apply_lora(copy.deepcopy(BASE), LoraSettings(rank=2))


def step(model, by=0.1):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(by)


def test_each_version_has_its_own_name_and_old_ones_are_unloaded(start, model):
    servers = [start(), start()]
    versions = []
    client = SimpleNamespace(
        server_urls=[server.url for server in servers],
        served_names={},
        weights_changed=lambda version, lost: versions.append(version),
    )
    publisher = create_lora_publisher(client, model)
    for version in (1, 2, 3):
        step(model)
        publisher.publish({}, version=version)
        assert client.served_names == {"policy": f"policy@{version}"}
    for server in servers:
        assert list(server.adapters) == ["policy@2", "policy@3"]
        assert server.version == "default"  # other runs may have adapters there, too
    assert versions == [1, 2, 3]
    folder = Path(servers[0].adapters["policy@3"])
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2
    stored = load_file(folder / "adapter_model.safetensors")
    assert stored.keys() == collect_adapter_weights(model).keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in collect_adapter_weights(model).items())


def test_if_one_server_cannot_load_a_version_none_keeps_it(start, model):
    servers = [start(), start()]
    publisher = create_lora_publisher([server.url for server in servers], model)
    publisher.publish({}, version=1)
    step(model)
    servers[1].faults["/v1/load_lora_adapter"] = refuse("LoRA rank 2 is greater than max_lora_rank", status=400)
    with pytest.raises(PublishError, match=r"servers keep policy@1.*max_lora_rank.*--lora-rank"):
        publisher.publish({}, version=2)
    assert [list(server.adapters) for server in servers] == [["policy@1"]] * 2
    assert publisher.served_name == "policy@1"
    servers[1].faults.clear()
    publisher.publish({}, version=2)
    assert [list(server.adapters) for server in servers] == [["policy@1", "policy@2"]] * 2


def test_unchanged_adapters_get_the_name_of_each_version_and_a_version_can_be_repeated(start, model, caplog):
    server = start()
    publisher = create_lora_publisher(server.url, model)
    publisher.publish({}, version=1)
    publisher.publish({}, version=1)
    publisher.publish({}, version=2)
    assert (list(server.adapters), publisher.served_name) == (["policy@1", "policy@2"], "policy@2")
    assert re.search("adapters of version 2 equal .*version 1", caplog.text)
    server.restart()
    publisher.publish({}, version=3)
    assert (list(server.adapters), publisher.served_name) == (["policy@3"], "policy@3")
    for version in range(4, 21):
        publisher.publish({}, version=version)
    with pytest.raises(PublishError, match=r"20 pushes .*version 21, .*the adapters"):
        publisher.publish({}, version=21)
    with pytest.raises(ConfigError, match="needs a version"):
        publisher.publish({})


def test_a_server_that_was_restarted_gets_the_next_version(start, model):
    server = start()
    publisher = create_lora_publisher(server.url, model)
    publisher.publish({}, version=1)
    server.restart()
    step(model)
    publisher.publish({}, version=2)
    assert list(server.adapters) == ["policy@2"]


def test_a_resumed_run_replaces_the_version_of_the_previous_run(start, model):
    """The servers were not restarted and refuse to load a name that is already loaded. A folder is
    not used again: the prefix cache tells adapters apart by name and folder."""
    server = start()
    create_lora_publisher(server.url, model).publish({}, version=4)
    before = dict(server.adapters)
    resumed = create_lora_publisher(server.url, model)
    step(model)
    resumed.publish({}, version=4)
    assert list(server.adapters) == ["policy@4"]
    assert server.adapters != before
    assert same(load_file(f"{server.adapters['policy@4']}/adapter_model.safetensors"), collect_adapter_weights(model))


def test_a_version_whose_answer_was_lost_is_loaded_again(start, model):
    server = start()
    publisher = create_lora_publisher(server.url, model)
    publisher.publish({}, version=1)
    step(model)

    def lost(body):
        server.on_v1_load_lora_adapter({}, body)
        raise Refused(500, "the answer is lost")

    server.faults |= {"/v1/load_lora_adapter": lost, "/v1/unload_lora_adapter": refuse("nor can it be taken back")}
    with pytest.raises(PublishError, match="the answer is lost"):
        publisher.publish({}, version=2)
    server.faults.clear()
    first = server.adapters["policy@2"]
    publisher.publish({}, version=2)
    assert list(server.adapters) == ["policy@1", "policy@2"]
    assert server.adapters["policy@2"] != first


def test_the_servers_get_the_file_of_the_adapters_and_hardly_a_byte_more(start, tmp_path):
    model = apply_lora(copy.deepcopy(BASE), LoraSettings(rank=64))
    server = start()
    publisher = create_lora_publisher(server.url, model)
    publisher.publish({}, version=1)
    step(model)
    before = server.bytes_received
    publisher.publish({}, version=2)
    save_adapter(model, tmp_path)
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert size < server.bytes_received - before <= 1.01 * size
    sent = load_file(f"{server.adapters['policy@2']}/adapter_model.safetensors")
    assert same(sent, load_file(tmp_path / "adapter_model.safetensors"))
    stored, own = (
        json.loads((folder / "adapter_config.json").read_text()) for folder in (Path(server.adapters["policy@2"]), tmp_path)
    )
    read = ("r", "lora_alpha", "use_rslora", "use_dora", "bias", "modules_to_save", "rank_pattern", "alpha_pattern")
    assert [stored[key] for key in read] == [own[key] for key in read]
    assert sorted(stored["target_modules"]) == sorted(own["target_modules"])


def test_weights_of_the_trainer_are_taken_and_merged_ones_are_not(start, model):
    server = start()
    publisher = create_lora_publisher(server.url, model)
    given = {name: tensor + 1 for name, tensor in collect_adapter_weights(model).items()}
    publisher.publish(given, version=1)
    publisher.publish(published_weights(model), version=2)
    sent = [load_file(f"{server.adapters[f'policy@{version}']}/adapter_model.safetensors") for version in (1, 2)]
    assert same(sent[0], given)
    assert same(sent[1], collect_adapter_weights(model))


def test_runs_with_names_of_their_own_share_a_server(start, model):
    server = start()
    clients = [SimpleNamespace(server_urls=[server.url], served_names={}) for _ in range(2)]
    publishers = [create_lora_publisher(client, model, served_as=f"run{number}") for number, client in enumerate(clients)]
    for version in (1, 2, 3):
        for publisher in publishers:
            step(model)
            publisher.publish({}, version=version)
    assert [client.served_names for client in clients] == [{"policy": "run0@3"}, {"policy": "run1@3"}]
    publishers[0].close()
    assert list(server.adapters) == ["run1@2", "run1@3"]


def test_a_refusal_is_found_by_a_trial_that_leaves_nothing(start, model):
    servers = [start(), start()]
    publisher = create_lora_publisher([server.url for server in servers], model)
    assert publisher.find_refusal() is None
    servers[1].faults["/v1/load_lora_adapter"] = refuse("LoRA rank 2 is greater than max_lora_rank", status=400)
    assert re.search("max_lora_rank", publisher.find_refusal())
    assert [server.adapters for server in servers] == [{}, {}]


@pytest.mark.parametrize(
    "messages",
    [
        [{"type": "http.request", "body": b"\x10\0\0\0\0\0\0\0{", "more_body": True}, {"type": "http.disconnect"}],
        [{"type": "http.request", "body": b"no adapter"}],
        [{"type": "http.request", "body": b"\x40\x0d\x03\0\0\0\0\0" + b"[" * 200_000}],
        [{"type": "http.request", "body": save({"a": torch.ones(1)}, metadata={"format": "pt"})}],
    ],
    ids=["the trainer is gone", "no safetensors", "no end of brackets", "no config"],
)
async def test_a_file_that_is_not_whole_or_no_adapter_leaves_nothing(messages, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arriving = iter(messages)

    async def receive():
        return next(arriving)

    store = AdapterStore()
    assert not list(tmp_path.iterdir())  # a server without adapters makes no folder
    status, answer = await store.store("first@1", receive)
    assert status == 400
    assert "first@1" in answer["error"]["message"]
    assert not list(tmp_path.glob("*/*"))


def test_a_sharded_model_needs_the_trainer_that_gathers_its_adapters(start, model):
    publisher = create_lora_publisher(start().url, model)
    model.set_requires_gradient_sync = None  # as `fully_shard` leaves it
    with pytest.raises(ConfigError, match=r"Trainer\(publisher"):
        publisher.publish({}, version=1)
