"""Separate learning rates and weight decays for head and backbone, biases and norms."""

import pytest
import torch
from small_models import causal_model, scoring_model
from training_samples import cpu_config, tiny_model

from ludic.errors import ConfigError
from ludic.training import LoraSettings, apply_lora
from ludic.training.backend.torch import build_optimizer, parameter_groups


def settings_of(model, optimizer):
    """(learning rate, weight decay) by parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}


def test_by_default_one_group_has_all_trained_parameters():
    model = tiny_model()
    model.model.embed_tokens.weight.requires_grad_(False)
    [group] = build_optimizer(model, cpu_config(lr=1e-3, weight_decay=0.1)).param_groups
    assert group["params"] == [p for p in model.parameters() if p.requires_grad]
    assert (group["lr"], group["weight_decay"]) == (1e-3, 0.1)


def test_the_backbone_learns_at_a_fraction_of_the_heads_rate():
    model = scoring_model("Qwen2")
    optimizer = build_optimizer(model, cpu_config(lr=1e-3, weight_decay=0.1), backbone_lr_mult=0.25)
    settings = settings_of(model, optimizer)
    assert settings.keys() == {name for name, _ in model.named_parameters()}
    assert {name for name, (rate, _) in settings.items() if rate == 1e-3} == {"score.weight"}
    assert {rate for name, (rate, _) in settings.items() if name != "score.weight"} == {2.5e-4}
    assert {decay for _, decay in settings.values()} == {0.1}
    assert optimizer.param_groups[0]["lr"] == 1e-3  # the learning rate that is logged


def test_weight_decay_can_be_limited_to_the_head():
    model = scoring_model("Qwen2")
    settings = settings_of(model, build_optimizer(model, cpu_config(weight_decay=0.1), head_only_weight_decay=True))
    assert {name for name, (_, decay) in settings.items() if decay == 0.1} == {"score.weight"}
    assert {decay for name, (_, decay) in settings.items() if name != "score.weight"} == {0.0}
    assert len({rate for rate, _ in settings.values()}) == 1


def test_biases_and_norms_can_be_excluded_from_weight_decay():
    model = causal_model("GPT2")
    settings = settings_of(model, build_optimizer(model, cpu_config(weight_decay=0.1, decay_biases_and_norms=False)))
    excluded = {name for name, (_, decay) in settings.items() if decay == 0.0}
    assert excluded == {name for name in settings if name.endswith("bias") or "ln_" in name}
    assert 0 < len(excluded) < len(settings)


def test_with_adapters_the_head_keeps_its_rate_and_the_adapters_get_the_backbones():
    model = apply_lora(scoring_model("Qwen2"), LoraSettings(rank=2))
    settings = settings_of(model, build_optimizer(model, cpu_config(lr=1.0), backbone_lr_mult=0.1, head_only_weight_decay=True))
    assert {name for name, (rate, _) in settings.items() if rate == 1.0} == {
        "base_model.model.score.modules_to_save.default.weight"
    }
    assert all("lora_" in name for name, (rate, _) in settings.items() if rate != 1.0)


def test_a_step_moves_the_head_further_than_the_backbone_by_the_ratio_of_their_rates():
    """Without weight decay, AdamW's first step is `lr * sign(g)`."""
    model = scoring_model("Qwen2")
    optimizer = build_optimizer(model, cpu_config(lr=1e-2, weight_decay=0.0), backbone_lr_mult=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    optimizer.step()
    moved = {name: (p.detach() - before[name]).abs().max().item() for name, p in model.named_parameters()}
    assert moved["score.weight"] == pytest.approx(1e-2, rel=1e-3)
    assert moved["model.layers.0.mlp.down_proj.weight"] == pytest.approx(1e-3, rel=1e-3)


def test_a_model_without_a_head_cannot_have_a_backbone_rate():
    for asked in ({"backbone_lr_mult": 0.1}, {"head_only_weight_decay": True}):
        with pytest.raises(ConfigError, match=r"need a head; .*ForCausalLM has no"):
            parameter_groups(causal_model("Qwen2"), lr=1.0, weight_decay=0.0, **asked)
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="backbone_lr_mult"):
            parameter_groups(scoring_model("Qwen2"), lr=1.0, weight_decay=0.0, backbone_lr_mult=wrong)


def test_a_frozen_model_has_nothing_to_train():
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(tiny_model().requires_grad_(False), cpu_config())
