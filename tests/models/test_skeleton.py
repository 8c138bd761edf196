"""Models without weights: the structure, buffers and ties of the model that is loaded."""

import pytest
import torch
from small_models import CAUSAL, MIXTURES, causal_model, mixture_model, scoring_model
from training_samples import tiny_model

from ludic.models.loading import load_classifier, load_model
from ludic.models.sharded_loading import drop_weights, load_skeleton, make_skeleton
from ludic.training import LoraSettings, apply_lora


def structure_of(model):
    """Name -> (shape, dtype, trained, the first name of its tensor)."""
    first = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    return {
        name: (tuple(parameter.shape), parameter.dtype, parameter.requires_grad, first[id(parameter)])
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def assert_is_skeleton_of(skeleton, model):
    assert structure_of(skeleton) == structure_of(model)
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    buffers = dict(model.named_buffers())
    assert {name for name, _ in skeleton.named_buffers()} == buffers.keys()
    for name, buffer in skeleton.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert skeleton.training == model.training


@pytest.mark.parametrize("architecture", CAUSAL)
def test_a_skeleton_has_everything_but_the_weights(architecture, tmp_path):
    causal_model(architecture).save_pretrained(tmp_path)
    for dtype in ("auto", "bfloat16"):
        loaded = load_model(str(tmp_path), dtype)
        assert_is_skeleton_of(load_skeleton(str(tmp_path), dtype), loaded)
    assert_is_skeleton_of(make_skeleton(loaded), loaded)
    assert all(parameter.device.type == "cpu" for parameter in loaded.parameters())


@pytest.mark.parametrize("architecture", MIXTURES)
def test_stored_buffers_have_the_dtype_of_those_that_are_loaded(architecture, tmp_path):
    mixture_model(architecture).save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):  # the biases stay in float32
        buffers = dict(load_model(str(tmp_path), dtype).named_buffers())
        skeleton = load_skeleton(str(tmp_path), dtype)
        assert structure_of(skeleton) == structure_of(load_model(str(tmp_path), dtype))
        assert {name: (like.dtype, like.shape) for name, like in skeleton.named_buffers()} == {
            name: (buffer.dtype, buffer.shape) for name, buffer in buffers.items()
        }


def test_a_skeleton_of_a_classifier_has_its_head(tmp_path):
    scoring_model("Qwen2").save_pretrained(tmp_path)
    loaded, _ = load_classifier(str(tmp_path), "float32", description="model", num_labels=1)
    assert_is_skeleton_of(load_skeleton(str(tmp_path), "float32", scores=True, num_labels=1), loaded)


def test_a_skeleton_of_adapters_is_that_of_the_model_they_are_merged_into(tmp_path):
    from ludic.models.lora import save_adapter

    base = tiny_model()
    base.save_pretrained(tmp_path / "base")
    save_adapter(apply_lora(base, LoraSettings(rank=2)), tmp_path / "adapter")
    loaded = load_model(str(tmp_path / "adapter"), "float32")
    assert {name: entry[0] for name, entry in structure_of(load_skeleton(str(tmp_path / "adapter"), "float32")).items()} == {
        name: entry[0] for name, entry in structure_of(loaded).items()
    }


def test_adapters_are_added_to_a_skeleton_as_to_the_model():
    adapted = apply_lora(tiny_model(), LoraSettings(rank=2))
    assert_is_skeleton_of(apply_lora(drop_weights(tiny_model()), LoraSettings(rank=2)), adapted)
    assert_is_skeleton_of(make_skeleton(adapted), adapted)


def test_weights_are_dropped_in_place():
    model = tiny_model()
    expected, held = structure_of(model), model.lm_head
    assert drop_weights(model) is model
    assert structure_of(model) == expected
    assert held.weight.is_meta  # also for those that hold a part of the model
