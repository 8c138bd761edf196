"""Conversion between parameter names of PEFT and of the plain model."""

import pytest

from ludic.models.names import is_adapter, strip_peft_parts


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("base_model.model.model.norm.weight", "model.norm.weight"),
        ("base_model.model.base_model.model.score.weight", "score.weight"),
        ("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight", "model.layers.0.mlp.up_proj.weight"),
        ("base_model.model.score.modules_to_save.default.weight", "score.weight"),
    ],
)
def test_plain_names_are_peft_names_without_wrappers(name, plain):
    assert strip_peft_parts(name) == plain
    assert strip_peft_parts(plain) == plain


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("model.layers.0.q_proj.lora_A.default.weight", True),
        ("model.layers.0.lora.weight", True),
        ("lora.weight", True),
        ("model.flora.weight", False),
        ("model.layers.0.q_proj.base_layer.weight", False),
    ],
)
def test_adapter_weights_are_recognised_by_name(name, adapter):
    assert is_adapter(name) is adapter


def test_converted_names_match_peft():
    from peft import LoraConfig, get_peft_model
    from torch import nn

    model = nn.ModuleDict({"up": nn.Linear(2, 2, bias=False), "score": nn.Linear(2, 1, bias=False)})
    plain = {name for name, _ in model.named_parameters()}
    adapted = get_peft_model(model, LoraConfig(target_modules=["up"], modules_to_save=["score"]))
    names = [name for name, _ in adapted.named_parameters() if not is_adapter(name) and ".original_module." not in name]
    assert {strip_peft_parts(name) for name in names} == plain
