"""Learning rates and weight decays of their own for head and backbone, biases and norms."""

import pytest
import torch
from small_models import causal_model, scoring_model
from training_samples import cpu_config, tiny_model

from ludic.errors import ConfigError
from ludic.training import LoraSettings, apply_lora
from ludic.training.backend.parameter_groups import parameter_groups
from ludic.training.backend.torch import build_optimizer


def settings_of(model, optimizer):
    """(rate, decay) of each parameter by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}


def test_by_default_there_is_one_group_of_all_that_is_trained():
    model = tiny_model()
    model.model.embed_tokens.weight.requires_grad_(False)
    [group] = build_optimizer(model, cpu_config(lr=1e-3, weight_decay=0.1)).param_groups
    assert group["params"] == [p for p in model.parameters() if p.requires_grad]
    assert (group["lr"], group["weight_decay"]) == (1e-3, 0.1)


def test_the_backbone_learns_at_a_share_of_the_rate_of_the_head():
    model = scoring_model("Qwen2")
    optimizer = build_optimizer(model, cpu_config(lr=1e-3, weight_decay=0.1), backbone_lr_mult=0.25)
    found = settings_of(model, optimizer)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert {name for name, (rate, _) in found.items() if rate == 1e-3} == {"score.weight"}
    assert {rate for name, (rate, _) in found.items() if name != "score.weight"} == {2.5e-4}
    assert {decay for _, decay in found.values()} == {0.1}
    assert optimizer.param_groups[0]["lr"] == 1e-3  # the rate that is logged


def test_weight_decay_of_the_head_alone():
    model = scoring_model("Qwen2")
    found = settings_of(model, build_optimizer(model, cpu_config(weight_decay=0.1), head_only_weight_decay=True))
    assert {name for name, (_, decay) in found.items() if decay == 0.1} == {"score.weight"}
    assert {decay for name, (_, decay) in found.items() if name != "score.weight"} == {0.0}
    assert len({rate for rate, _ in found.values()}) == 1


def test_biases_and_norms_are_spared_when_asked():
    model = causal_model("GPT2")
    found = settings_of(model, build_optimizer(model, cpu_config(weight_decay=0.1, decay_biases_and_norms=False)))
    spared = {name for name, (_, decay) in found.items() if decay == 0.0}
    assert spared == {name for name in found if name.endswith("bias") or "ln_" in name}
    assert 0 < len(spared) < len(found)


def test_behind_adapters_the_head_keeps_its_rate_and_the_adapters_are_the_backbone():
    model = apply_lora(scoring_model("Qwen2"), LoraSettings(rank=2))
    found = settings_of(model, build_optimizer(model, cpu_config(lr=1.0), backbone_lr_mult=0.1, head_only_weight_decay=True))
    assert {name for name, (rate, _) in found.items() if rate == 1.0} == {"base_model.model.score.modules_to_save.default.weight"}
    assert all("lora_" in name for name, (rate, _) in found.items() if rate != 1.0)


def test_a_step_moves_the_head_further_by_the_ratio():
    """AdamW's first step is `lr * sign(g)` without decay."""
    model = scoring_model("Qwen2")
    optimizer = build_optimizer(model, cpu_config(lr=1e-2, weight_decay=0.0), backbone_lr_mult=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    optimizer.step()
    moved = {name: (p.detach() - before[name]).abs().max().item() for name, p in model.named_parameters()}
    assert moved["score.weight"] == pytest.approx(1e-2, rel=1e-3)
    assert moved["model.layers.0.mlp.down_proj.weight"] == pytest.approx(1e-3, rel=1e-3)


def test_without_a_head_there_is_no_rate_of_its_own():
    for asked in ({"backbone_lr_mult": 0.1}, {"head_only_weight_decay": True}):
        with pytest.raises(ConfigError, match="has no head"):
            parameter_groups(causal_model("Qwen2"), lr=1.0, weight_decay=0.0, **asked)
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="backbone_lr_mult"):
            parameter_groups(scoring_model("Qwen2"), lr=1.0, weight_decay=0.0, backbone_lr_mult=wrong)


def test_a_frozen_model_has_nothing_to_train():
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(tiny_model().requires_grad_(False), cpu_config())
