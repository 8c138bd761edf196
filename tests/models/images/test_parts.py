"""Which parts of a model that sees images get adapters, are quantised, and are trained."""

import pytest
import torch
from tiny_vision import BLOCKS, EXACT, PADDED, make_picture, make_tiny_vision

from ludic.errors import ConfigError
from ludic.models.images.features import TOWERS, encode_images, find_image_modules, set_trained_parts
from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.quantization import QuantizationSettings, find_quantizable_layers

NAMES = (*EXACT, *PADDED, *BLOCKS[:1])


def name_layers(model, kind=torch.nn.Linear):
    return {name for name, module in model.named_modules() if isinstance(module, kind)}


@pytest.mark.parametrize("name", NAMES)
def test_adapters_and_quantised_weights_are_in_the_language_model_alone(name):
    model, _ = make_tiny_vision(name)
    decoder = {id(module) for module in model.get_decoder().modules()}
    own = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and id(module) in decoder}
    assert find_quantizable_layers(model, QuantizationSettings("int8")).keys() == own
    for settings in (LoraSettings(rank=2), LoraSettings(rank=2, target_modules=["q_proj", "v_proj", "in_proj_qkv"])):
        adapted = apply_lora(make_tiny_vision(name)[0], settings).get_base_model()
        with_adapters = {layer for layer, module in adapted.named_modules() if hasattr(module, "lora_A")}
        assert with_adapters
        assert with_adapters <= own
    if name in ("llava", "gemma3"):  # of which the towers have layers of the same names
        assert {layer.rpartition(".")[2] for layer in find_image_modules(model)} >= {"q_proj", "v_proj"}


def test_layers_that_the_tower_alone_has_are_adapted_if_they_are_named():
    adapted = apply_lora(make_tiny_vision("llava")[0], LoraSettings(rank=2, target_modules=["q_proj", "fc1"])).get_base_model()
    with_adapters = {layer for layer, module in adapted.named_modules() if hasattr(module, "lora_A")}
    assert {layer.rpartition(".")[2] for layer in with_adapters if "language_model" in layer} == {"q_proj"}
    assert {layer.rpartition(".")[2] for layer in with_adapters if "language_model" not in layer} == {"fc1"}


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_that_are_trained_are_those_that_features_depend_on(name):
    model, processor = make_tiny_vision(name)
    image = processor.process(processor.store.add(make_picture(32, 32)))
    depends: dict[str, set[str]] = {}
    of_images = {
        f"{name}.{own}" for name, module in find_image_modules(model).items() for own, _ in module.named_parameters(recurse=False)
    }
    for tower in TOWERS:
        set_trained_parts(model, tower)
        [features] = encode_images(model, [image])
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trained.keys() >= dict(model.named_parameters()).keys() - of_images
        own = {name: parameter for name, parameter in trained.items() if name in of_images}
        depends[tower] = set()
        if tower == "frozen":
            assert not own
            assert not features.tensors[0].requires_grad
            continue
        total = sum(tensor.square().sum() for tensor in features.tensors)
        gradients = torch.autograd.grad(total, list(own.values()), allow_unused=True)
        depends[tower] = {name for name, gradient in zip(own, gradients, strict=True) if gradient is not None}
        if tower == "projector":
            assert depends[tower] == own.keys()
    assert depends["projector"]
    assert depends["projector"] < depends["trained"]


def test_a_tower_is_not_trained_beside_adapters():
    adapted = apply_lora(make_tiny_vision("qwen2_vl")[0], LoraSettings(rank=2))
    set_trained_parts(adapted, "frozen")
    with pytest.raises(ConfigError, match=r"images.tower \(trained\) .*frozen"):
        set_trained_parts(adapted, "trained")
    with pytest.raises(ConfigError, match=r"images.tower \('melted'\)"):
        set_trained_parts(adapted, "melted")
