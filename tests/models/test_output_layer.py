"""The output layer as sums of products has the logits of the model."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small_models import CAUSAL, LLAMA, causal_model, make_from_config
from torch import nn

from ludic.errors import ConfigError
from ludic.models.lora import LoraSettings, adapters_off, apply_lora
from ludic.models.output_layer import OutputLayer

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
TRANSFORMS = {
    "Gemma2": {"final_logit_softcapping": 0.5, "head_dim": 8},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 8.0},
}


def logits_of(model):
    """The model's logits, and those of its layer."""
    model.eval()
    layer = OutputLayer.of(model)
    with layer.captured_inputs(skip=False) as seen:
        logits = model(input_ids=IDS).logits
    products = layer.products(seen[0][0])
    sums = sum(inputs @ weights.T for inputs, weights in zip(products.inputs, products.weights, strict=True))
    return logits, layer.transform(sums if products.bias is None else sums + products.bias)[None]


def with_adapters_on_the_head(**settings):
    model = apply_lora(causal_model("Llama"), LoraSettings(rank=3, target_modules=["lm_head"], **settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # they begin at 0
            nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("architecture", sorted(CAUSAL))
def test_every_architecture_has_the_logits_of_its_output_layer(architecture):
    model = causal_model(architecture)
    torch.testing.assert_close(*logits_of(model))


@pytest.mark.parametrize("architecture", TRANSFORMS)
def test_soft_caps_and_scales_are_read_from_the_configuration(architecture):
    model = make_from_config(architecture, "ForCausalLM", {**LLAMA, **TRANSFORMS[architecture]}, 0)
    logits, ours = logits_of(model)
    torch.testing.assert_close(logits, ours)
    layer = OutputLayer.of(model)
    with layer.captured_inputs(skip=False) as seen:
        model(input_ids=IDS)
    assert (layer.module(seen[0]) - logits).abs().max() > 0.05  # what the layer itself returns


def test_a_layer_with_adapters_is_the_sum_of_two_products():
    model = with_adapters_on_the_head()
    logits, ours = logits_of(model)
    torch.testing.assert_close(logits, ours)
    with adapters_off(model):
        without, ours = logits_of(model)
        torch.testing.assert_close(without, ours)
    assert (logits - without).abs().max() > 0.1


def test_a_layer_that_is_trained_in_full_is_the_trained_copy():
    model = apply_lora(causal_model("Llama"), LoraSettings(rank=3, modules_to_save=["lm_head"]))
    nn.init.normal_(OutputLayer.of(model).weight)
    torch.testing.assert_close(*logits_of(model))
    with adapters_off(model):
        torch.testing.assert_close(*logits_of(model))


def test_adapters_that_are_merged_count_once():
    model = with_adapters_on_the_head()
    before, _ = logits_of(model)
    model.merge_adapter()
    logits, ours = logits_of(model)
    torch.testing.assert_close(logits, ours)
    torch.testing.assert_close(logits, before, rtol=1e-4, atol=1e-4)


def test_without_its_output_layer_the_model_returns_no_logits():
    model = causal_model("Llama")
    layer = OutputLayer.of(model)
    with layer.captured_inputs(skip=True) as seen:
        assert model(input_ids=IDS).logits.shape == (1, 0, 64)
    assert seen[0].shape == (1, 8, 16)
    assert model(input_ids=IDS).logits.shape == (1, 8, 64)


def run_in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=60)


def test_another_thread_has_the_logits_of_the_model_meanwhile():
    model = causal_model("Llama")
    layer = OutputLayer.of(model)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    with layer.replaced_output(layer.probe(8)):
        assert (model(input_ids=IDS).logits - layer.probe(8)).abs().max() == 0
        torch.testing.assert_close(run_in_a_thread(lambda: model(input_ids=IDS).logits.detach()), logits)
    with layer.captured_inputs(skip=True) as seen:
        torch.testing.assert_close(run_in_a_thread(lambda: model(input_ids=IDS).logits.detach()), logits)
        assert not seen


def test_a_layer_of_another_kind_is_refused():
    model = causal_model("Llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ConfigError, match=r"is a torch\.nn\.modules\.container\.Sequential, not a Linear"):
        OutputLayer.of(model)
    with pytest.raises(ConfigError, match="Embedding has no output layer"):
        OutputLayer.of(nn.Embedding(2, 2))
