"""The head of a classifier under LoRA: all of it is trained and saved, for every architecture."""

import pytest
import torch
from safetensors.torch import load_file
from small_models import causal_model, scoring_model
from torch import nn

from ludic.errors import ConfigError
from ludic.models.heads import find_head, find_head_parts
from ludic.models.lora import find_target_modules, load_adapter, save_adapter
from ludic.models.published import published_weights
from ludic.training import LoraSettings, apply_lora
from ludic.training.backend.torch import build_optimizer

HEADS = {
    "Llama": ["score"],
    "Qwen2": ["score"],
    "Qwen3": ["score"],
    "GPT2": ["score"],
    "Gemma": ["score"],
    "Bert": ["classifier"],  # its pooler belongs to the loaded base model
    "Roberta": ["classifier"],
    "ModernBert": ["classifier", "head"],
    "DebertaV2": ["classifier", "pooler"],
}
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 3, 3, 4, 1]])


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def one_step(model):
    """The names of the weights that one step changes."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits.square().sum().backward()
    optimizer.step()
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


def plain(name):
    return name.replace(".modules_to_save.default.", ".").removeprefix("base_model.model.")


@pytest.mark.parametrize(("architecture", "heads"), HEADS.items())
def test_every_part_of_the_head_is_trained_and_saved(architecture, heads, tmp_path):
    model = scoring_model(architecture)
    assert (find_head(model), find_head_parts(model)) == (heads[0], heads)
    weights = {name for name, _ in model.named_parameters() if name.split(".")[0] in heads}
    backbone = {name for name, _ in model.named_parameters() if name.startswith(f"{model.base_model_prefix}.")}
    assert weights | backbone == {name for name, _ in model.named_parameters()}  # no other weight may keep its initial value
    adapted = apply_lora(model, LoraSettings(rank=2))
    assert find_head_parts(adapted) == [f"base_model.model.{part}" for part in heads]
    assert {plain(name) for name in one_step(adapted) if "lora_" not in name} == weights
    save_adapter(adapted, tmp_path)
    stored = {plain(name) for name in load_file(tmp_path / "adapter_model.safetensors") if "lora_" not in name}
    assert stored == weights
    other = scoring_model(architecture)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name in weights:
                parameter.add_(1.0)  # a newly initialised head, as of a model loaded without one
    torch.testing.assert_close(logits(load_adapter(other, tmp_path)), logits(adapted), atol=1e-5, rtol=1e-5)
    published = published_weights(adapted)
    merged = scoring_model(architecture, seed=1)
    merged.load_state_dict({**scoring_model(architecture).state_dict(), **published})
    torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["ModernBert", "DebertaV2"])
@pytest.mark.parametrize("with_adapters", [False, True])
def test_every_part_of_the_head_has_the_heads_learning_rate(architecture, with_adapters):
    from training_samples import cpu_config

    model = scoring_model(architecture)
    model = apply_lora(model, LoraSettings(rank=2)) if with_adapters else model
    optimizer = build_optimizer(model, cpu_config(lr=1e-3), backbone_lr_mult=0.5)
    names = {parameter: plain(name) for name, parameter in model.named_parameters()}
    fast = {names[p].split(".")[0] for group in optimizer.param_groups if group["lr"] == 1e-3 for p in group["params"]}
    slow = {names[p].split(".")[0] for group in optimizer.param_groups if group["lr"] == 5e-4 for p in group["params"]}
    assert (sorted(fast), len(slow)) == (HEADS[architecture], 1)


class ScorerForSequenceClassification(nn.Module):
    """A classifier whose head has an unknown name."""

    base_model_prefix = "encoder"

    def __init__(self):
        super().__init__()
        self.encoder = causal_model("Qwen2").model
        self.scorer = nn.Linear(16, 1)


def test_a_classifier_with_an_unknown_head_is_an_error_and_not_left_frozen():
    with pytest.raises(ConfigError, match=r"modules_to_save .*outside of encoder .*scorer"):
        apply_lora(ScorerForSequenceClassification(), LoraSettings(rank=2))
    adapted = apply_lora(ScorerForSequenceClassification(), LoraSettings(rank=2, modules_to_save=["scorer"]))
    trained = {plain(name) for name, parameter in adapted.named_parameters() if parameter.requires_grad and "lora_" not in name}
    assert trained == {"scorer.weight", "scorer.bias"}


def test_a_model_that_is_not_a_classifier_needs_no_head():
    adapted = apply_lora(causal_model("Qwen2"), LoraSettings(rank=2))
    assert find_head_parts(adapted) == []
    assert not adapted.peft_config["default"].modules_to_save


def test_adapters_are_added_to_debertas_attention():
    targets = find_target_modules(scoring_model("DebertaV2"))
    assert targets == ["dense", "key_proj", "query_proj", "value_proj"]
