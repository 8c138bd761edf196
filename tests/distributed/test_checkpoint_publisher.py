"""Publishing through checkpoint folders: SGLang servers, and engines that read a checkpoint."""

import contextlib
import json

import pytest
import torch
from safetensors.torch import save_file
from stub_sglang import StubSGLang
from stub_weight_server import refuse, same, weights

from ludic.distributed import create_checkpoint_publisher
from ludic.distributed.adapters.checkpoint import SGLangEngine, VLLMEngine, sync_weights_to_engines
from ludic.distributed.push.manifest import VersionFolders
from ludic.errors import ConfigError, PublishError
from ludic.inference.sglang import SGLangClient


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(weights(0), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dtype": "float32", "tie_word_embeddings": False}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def servers(model):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(StubSGLang(model)) for _ in range(2)]


def serve(servers, version, seed):
    for server in servers:
        assert same(server.served, weights(seed))
        assert (server.version, server.paused) == (version, False)
        assert all(server.was_paused)


async def test_sglang_servers_read_each_version_from_its_folder(servers, model, tmp_path):
    client = SGLangClient([server.url for server in servers])
    publisher = create_checkpoint_publisher(client, tmp_path / "shared", model=model)
    for version in (1, 2, 3):
        publisher.publish({f"base_model.model.{name}": t for name, t in weights(version).items()}, version=version)
        serve(servers, str(version), version)
    assert await client.get_policy_version() == 3
    assert client.sync_weights(weights(4), version=4) == "4"
    serve(servers, "4", 4)
    folders = sorted((tmp_path / "shared").iterdir())
    assert [folder.name for folder in folders] == ["version_3", "version_4"]
    assert sorted(path.name for path in folders[0].iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("earlier", [0, 1])
def test_if_one_server_cannot_load_a_version_all_return_to_the_previous_one(servers, model, tmp_path, earlier):
    publisher = create_checkpoint_publisher(SGLangClient([s.url for s in servers]), tmp_path / "shared", model=model)
    if earlier:
        publisher.publish(weights(1), version=1)
    servers[1].fails_on = "2"
    with pytest.raises(PublishError, match=f"version 2 was not published, servers are back at .*{servers[1].url}"):
        publisher.publish(weights(2), version=2)
    serve(servers, str(earlier) if earlier else "default", earlier)


def test_weights_that_do_not_match_are_refused_before_a_server_is_contacted(servers, model, tmp_path):
    publisher = create_checkpoint_publisher(SGLangClient(servers[0].url), tmp_path / "shared", model=model)
    with pytest.raises(PublishError, match="has shape"):
        publisher.publish({**weights(1), "model.norm.weight": torch.ones(3)}, version=1)
    assert servers[0].calls == []


async def test_unchanged_weights_are_loaded_only_by_servers_that_lost_them(servers, model, tmp_path):
    client = SGLangClient([server.url for server in servers])
    publisher = create_checkpoint_publisher(client, tmp_path / "shared", model=model)

    def reads():
        return [[path for path, _ in server.calls].count("/update_weights_from_disk") for server in servers]

    publisher.publish(weights(1), version=1)
    publisher.publish(weights(1), version=2)
    assert reads() == [1, 1]
    serve(servers, "2", 1)
    assert await client.get_policy_version() == 2
    servers[1].version, servers[1].served = "default", weights(0)  # it was restarted
    publisher.publish(weights(1), version=3)
    assert reads() == [2, 2]
    serve(servers, "3", 1)


def test_frozen_weights_of_sglang_servers_stay_those_of_the_folder(servers, model, tmp_path):
    publisher = create_checkpoint_publisher(SGLangClient(servers[0].url), tmp_path / "shared", model=model, partial=True)
    trained = dict(list(weights(1).items())[:1])
    publisher.publish(trained, version=1)
    assert same(servers[0].served, {**weights(0), **trained})
    whole = create_checkpoint_publisher(SGLangClient(servers[0].url), tmp_path / "whole", model=model)
    with pytest.raises(PublishError, match="are missing in the push"):
        whole.publish(trained, version=2)


def test_sglang_needs_the_folder_of_the_model(servers, tmp_path):
    with pytest.raises(ConfigError, match="pass model="):
        create_checkpoint_publisher(SGLangClient(servers[0].url), tmp_path)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        VersionFolders(tmp_path, model=tmp_path)


def test_for_vllm_the_publisher_validates_and_stages(start, tmp_path):
    server = start()
    create_checkpoint_publisher(server.url, tmp_path / "shared").publish(weights(1), version=1)
    assert same(server.served, weights(1))
    assert server.paused is None


async def test_engines_load_a_checkpoint_and_report_in_order(start, servers, model, tmp_path):
    vllm = start()
    checkpoint = VersionFolders(tmp_path / "checkpoints", model=model).write(weights(5), 5)
    engines = [SGLangEngine(f"{servers[0].url}/"), VLLMEngine(vllm.url)]
    first, second = await sync_weights_to_engines(engines, str(checkpoint))
    assert first["message"].startswith("Succeeded")
    assert (second["success"], second["version"], second["message"]) == (True, "version_5", "version_5 is served")
    assert len(second["fingerprint"]) == 32
    assert same(servers[0].served, weights(5))
    assert servers[0].version == "version_5"
    assert same(vllm.served, weights(5))


def cut_file(folder):
    """The file is truncated, as after a kill of the trainer."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def drop_file(folder):
    """One of two files is missing."""
    names = list(weights(5))
    save_file({name: weights(5)[name] for name in names[1:]}, folder / "model.safetensors")
    places = {**dict.fromkeys(names, "model.safetensors"), names[0]: "first.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def shorter(folder):
    save_file({name: tensor for name, tensor in weights(5).items() if name != "model.norm.weight"}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut_file, "not a complete checkpoint"),
        (drop_file, "not a complete checkpoint"),
        (shorter, r"model\.norm\.weight.* missing"),
    ],
)
async def test_an_incomplete_checkpoint_is_refused_before_the_server_is_contacted(start, tmp_path, spoil, message):
    server = start()
    folder = VersionFolders(tmp_path / "checkpoints").write(weights(5), 5)
    spoil(folder)
    with pytest.raises(PublishError, match=f"(?s)1 of 1 engines.*{message}"):
        await sync_weights_to_engines([VLLMEngine(server.url)], str(folder))
    assert "/start_weight_update" not in server.paths()
    assert same(server.served, weights(0))


async def test_frozen_weights_may_be_missing_if_allowed(start, tmp_path):
    server = start()
    name = "model.layers.1.mlp.up_proj.weight"
    folder = VersionFolders(tmp_path / "checkpoints").write({name: weights(5)[name]}, 5)
    await sync_weights_to_engines([VLLMEngine(server.url, partial=True)], str(folder))
    assert same(server.served, {**weights(0), name: weights(5)[name]})


async def test_the_servers_weights_are_compared_with_the_checkpoint(start, tmp_path):
    server = start()
    server.loads_nothing = True
    folder = str(VersionFolders(tmp_path / "checkpoints").write(weights(5), 5))
    with pytest.raises(PublishError, match="5 are served with other values"):
        await sync_weights_to_engines([VLLMEngine(server.url)], folder)
    assert same(server.served, weights(0))  # it went back to what it was started with
    assert (server.paused, server.version) == (None, "default")


async def test_a_checkpoint_of_another_dtype_is_compared_in_the_servers_dtype(start, tmp_path):
    server = start(dtype="bfloat16", first=weights(0, torch.bfloat16))
    folder = str(VersionFolders(tmp_path / "checkpoints").write(weights(5), 5))
    await sync_weights_to_engines([VLLMEngine(server.url)], folder)
    assert same(server.served, weights(5, torch.bfloat16))


async def test_a_tied_head_in_a_checkpoint_must_be_the_embedding(start, tmp_path):
    server = start(tied=True)
    folder = VersionFolders(tmp_path / "checkpoints").write({**weights(5), "lm_head.weight": torch.ones(12, 4)}, 5)
    with pytest.raises(PublishError, match="tie_word_embeddings"):
        await sync_weights_to_engines([VLLMEngine(server.url)], str(folder))
    assert same(server.served, weights(0))


async def test_a_failing_engine_is_reported_at_its_position(start, servers, tmp_path, model):
    vllm = start()
    vllm.faults["/update_weights"] = refuse("disk is full")
    checkpoint = str(VersionFolders(tmp_path / "checkpoints", model=model).write(weights(5), 5))
    engines = [VLLMEngine(vllm.url), SGLangEngine(servers[0].url)]
    failed, good = await sync_weights_to_engines(engines, checkpoint, policy="any")
    assert not failed["success"]
    assert "disk is full" in failed["error"]
    assert good["success"]
    with pytest.raises(PublishError, match="1 of 2 engines did not load"):
        await sync_weights_to_engines(engines, checkpoint)
    with pytest.raises(ConfigError, match="no engine"):
        await sync_weights_to_engines([], checkpoint)
    with pytest.raises(ConfigError, match="checkpoint_path is empty"):
        await sync_weights_to_engines(engines, "")


def test_a_folder_is_published_completely_or_not_at_all(tmp_path):
    folders = VersionFolders(tmp_path, keep=1)
    folders.write(weights(1), 1)

    def dies(aside):
        (aside / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folders.fill(2, dies)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["version_1"]

    def fails(aside):
        (aside / "model.safetensors").write_bytes(b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        folders.fill(2, fails)
    assert [path.name for path in tmp_path.iterdir()] == ["version_1"]
    with pytest.raises(ConfigError, match="without slashes"):
        folders.write(weights(1), "../../away")
    with pytest.raises(ConfigError, match="keep"):
        VersionFolders(tmp_path, keep=0)
