"""Weights of models that see images, on their way to a server: their checkpoints have other names
than their modules."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_vision import EXACT, make_tiny_vision

from ludic.distributed.adapters.checkpoint import _read_manifest
from ludic.distributed.push.manifest import ServerManifest, StreamToServer, cast_to_server, rename_to_checkpoint
from ludic.errors import PublishError
from ludic.inference.vllm.in_server.weight_receiver import Checkpoint
from ludic.models.images.features import set_trained_parts
from ludic.models.loading import load_model
from ludic.models.published import has_frozen_weights, published_weights
from ludic.models.saving import save_policy


class Streamed(dict):
    """Weights as a `WeightSource` gives them."""

    def __iter__(self):
        return iter(list(self.items()))

    def describe(self):
        return dict(self.items())


@pytest.mark.parametrize("name", [*EXACT, "gemma3", "qwen3_5"])
def test_weights_are_sent_under_the_names_of_the_checkpoint(name, tmp_path):
    model, processor = make_tiny_vision(name)
    save_policy(model, processor.tokenizer, tmp_path)
    stored = dict(Checkpoint(tmp_path).read(list(Checkpoint(tmp_path).weights)))
    manifest, published = _read_manifest(tmp_path), published_weights(model)
    sent = cast_to_server(rename_to_checkpoint(published), manifest, partial=False)
    assert sent.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in sent.items())
    streamed = StreamToServer(Streamed(published), manifest, partial=False)
    assert dict(streamed).keys() == streamed.describe().keys() == stored.keys()


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_weights_keep_the_names_of_a_checkpoint_of_an_older_transformers(name, tmp_path):
    """As those of the hub have them: the tower was one module deeper."""
    model, processor = make_tiny_vision(name)
    save_policy(model, processor.tokenizer, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    older = {key.replace("vision_tower.", "vision_tower.vision_model."): value for key, value in written.items()}
    save_file(older, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(tmp_path), "float32")
    sent = cast_to_server(rename_to_checkpoint(published_weights(loaded)), _read_manifest(tmp_path), partial=False)
    assert sent.keys() == older.keys() != written.keys()
    assert all(torch.equal(tensor, older[key]) for key, tensor in sent.items())


def test_the_weights_of_a_frozen_tower_are_left_out(tmp_path):
    model, processor = make_tiny_vision("qwen2_vl")
    save_policy(model, processor.tokenizer, tmp_path)
    assert not has_frozen_weights(model)
    set_trained_parts(model, "frozen")
    assert has_frozen_weights(model)
    manifest, published = _read_manifest(tmp_path), rename_to_checkpoint(published_weights(model))
    sent = cast_to_server(published, manifest, partial=True)
    assert set(manifest.weights) - set(sent) == {name for name in manifest.weights if name.startswith("visual.")}
    with pytest.raises(PublishError, match=r"visual\..* are missing in the push"):
        cast_to_server(published, manifest, partial=False)


def test_a_folder_whose_config_names_no_model_keeps_its_names(tmp_path):
    model, processor = make_tiny_vision("llava")
    save_policy(model, processor.tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({key: config[key] for key in config if key not in ("architectures", "model_type")})
    )
    assert _read_manifest(tmp_path).rename({"model.visual.norm": 1}) == {"model.visual.norm": 1}


def test_servers_serve_one_model_if_their_configs_differ_in_what_is_no_weight():
    """As copies of a model that two versions of transformers wrote."""
    answer = {"dtype": "float32", "tied": False, "weights": {"model.norm.weight": {"shape": [4], "dtype": "float32"}}}
    first, second = (ServerManifest.from_answer({**answer, "config": {"transformers_version": each}}, "") for each in "45")
    assert first == second
    assert first != ServerManifest.from_answer({**answer, "dtype": "bfloat16"}, "")
