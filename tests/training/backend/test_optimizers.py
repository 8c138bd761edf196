"""Optimizers by name: what each steps, by which rule, and where it is refused."""

import json
import math
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from forked_scripts import run_script
from small_models import scoring_model
from training_samples import ListSource, cpu_config, sorting_items, tiny_model

from ludic.errors import CheckpointError, ConfigError, MissingExtraError
from ludic.models.lora import LoraSettings, apply_lora
from ludic.training import CheckpointConfig, Trainer, make_grpo
from ludic.training.backend.optimizers import hidden_matrices
from ludic.training.backend.torch import build_optimizer


def names_of(model, parameters):
    return {name for name, parameter in model.named_parameters() if any(parameter is each for each in parameters)}


class Matrix(torch.nn.Module):
    def __init__(self, values):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(values))


def one_step(values, gradient, **changes):
    """The weight after one step."""
    model = Matrix(values)
    optimizer = build_optimizer(model, cpu_config(**changes))
    model.weight.grad = torch.tensor(gradient)
    optimizer.step()
    return model.weight.detach()


def test_muon_has_the_hidden_matrices_and_adamw_the_rest():
    model = tiny_model(tie_word_embeddings=False)
    hidden = names_of(model, hidden_matrices(model))
    assert hidden == {name for name, _ in model.named_parameters() if "_proj.weight" in name}
    groups = build_optimizer(model, cpu_config(optimizer="muon", decay_biases_and_norms=False)).param_groups
    assert [group.get("momentum") for group in groups] == [None, None, 0.95, 0.95]
    stepped = [names_of(model, group["params"]) for group in groups]
    assert stepped[0] == {"model.embed_tokens.weight", "lm_head.weight"}
    assert stepped[2:] == [hidden, set()]  # all have weight decay


def test_muon_has_adapters_and_no_head_that_scores():
    model = apply_lora(scoring_model("Qwen2"), LoraSettings(rank=2))
    hidden = names_of(model, hidden_matrices(model))
    assert hidden
    assert all(".lora_A." in name or ".lora_B." in name for name in hidden)


def test_a_muon_step_is_the_orthogonalised_gradient_at_the_size_of_adamws():
    # Both singular values of the gradient 3 I are 1/sqrt(2) of its norm. Then five times
    # x <- a x + b x^3 + c x^5.
    x = 1 / math.sqrt(2)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    moved = one_step([[1.0, 2.0], [3.0, 4.0]], [[3.0, 0.0], [0.0, 3.0]], optimizer="muon", lr=0.1, weight_decay=0.5)
    step = 0.1 * 0.2 * math.sqrt(2) * x  # lr * 0.2 * sqrt(max(2, 2))
    decayed = [[0.95, 1.9], [2.85, 3.8]]  # 1 - 0.1 * 0.5
    expected = torch.tensor([[decayed[0][0] - step, decayed[0][1]], [decayed[1][0], decayed[1][1] - step]])
    torch.testing.assert_close(moved, expected, atol=1e-3, rtol=0)  # in bfloat16


def test_an_adafactor_step_is_relative_to_the_weight():
    # Row and column means of the squared gradient are 1, so the update is the gradient, of root
    # mean square 1, as clipping allows. That of the weight is 2: 2 * min(0.1, 1 / sqrt(1)).
    moved = one_step([[2.0, -2.0], [2.0, 2.0]], [[1.0, 1.0], [-1.0, 1.0]], optimizer="adafactor", lr=0.1, weight_decay=0.0)
    torch.testing.assert_close(moved, torch.tensor([[1.8, -2.2], [2.2, 1.8]]))


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_weight_decay_is_decoupled_and_leaves_out_biases_and_norms(name):
    model = tiny_model()
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = build_optimizer(model, cpu_config(optimizer=name, lr=0.1, weight_decay=0.5, decay_biases_and_norms=False))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), before[key] * (0.95 if value.ndim == 2 else 1.0))


def test_a_factory_of_your_own_gets_the_trained_parameters_and_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine_for_optimizers.py").write_text(
        "import torch\n"
        "def make(named, cfg):\n"
        "    return torch.optim.SGD([p for _, p in named if p.ndim == 2], lr=cfg.lr * 2)\n"
        "def wrong(named, cfg):\n"
        "    return [name for name, _ in named]\n"
    )
    model = tiny_model()
    model.model.norm.weight.requires_grad_(False)
    optimizer = build_optimizer(model, cpu_config(optimizer="mine_for_optimizers:make", lr=0.25))
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ConfigError, match=r"mine_for_optimizers:wrong.* returned list"):
        build_optimizer(model, cpu_config(optimizer="mine_for_optimizers:wrong"))
    with pytest.raises(ConfigError, match=r"optimizer \(mine_for_optimizers:absent\)"):
        build_optimizer(model, cpu_config(optimizer="mine_for_optimizers:absent"))


def test_adamw8bit_is_refused_without_its_library_and_where_it_has_no_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match="qlora"):
        build_optimizer(tiny_model(), cpu_config(optimizer="adamw8bit"))

    class Without(torch.optim.AdamW):
        def step(self):
            raise NotImplementedError("no kernel")

    library, optim = types.ModuleType("bitsandbytes"), types.ModuleType("bitsandbytes.optim")
    library.optim, optim.AdamW8bit = optim, Without
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", optim)
    with pytest.raises(ConfigError, match="no kernel for cpu; use adamw"):
        build_optimizer(tiny_model(), cpu_config(optimizer="adamw8bit"))


def test_adamw8bit_has_moments_of_8_bits():
    pytest.importorskip("bitsandbytes")
    model = Matrix(torch.ones(64, 64).tolist())
    optimizer = build_optimizer(model, cpu_config(optimizer="adamw8bit", lr=0.1, weight_decay=0.0))
    model.weight.grad = torch.ones(64, 64)
    optimizer.step()
    assert optimizer.state[model.weight]["state1"].dtype == torch.uint8
    torch.testing.assert_close(model.weight.detach(), torch.full((64, 64), 0.9), atol=2e-3, rtol=0)
    other = build_optimizer(Matrix(torch.ones(64, 64).tolist()), cpu_config(optimizer="adamw8bit"))
    other.load_state_dict(optimizer.state_dict())
    [state] = other.state.values()
    assert torch.equal(state["state1"], optimizer.state[model.weight]["state1"])
    assert state["state1"].dtype == torch.uint8


def test_a_run_is_not_resumed_with_another_optimizer(tmp_path):
    def trainer(name, **options):
        source = ListSource(sorting_items(8, weight=1.0))
        checkpoints = CheckpointConfig(tmp_path, every_n_steps=1)
        cfg = cpu_config(optimizer=name)
        return Trainer(
            model=tiny_model(),
            algo=make_grpo(group_size=4),
            batch_source=source,
            cfg=cfg,
            checkpoint_config=checkpoints,
            **options,
        )

    trainer("muon").train_sync(1)
    with pytest.raises(CheckpointError, match="is of Muon, the optimizer is Adafactor"):
        trainer("adafactor", resume_from=1)


@pytest.mark.integration
def test_sharded_steps_and_resumed_ones_equal_those_of_one_process(tmp_path):
    cases = ["muon-half", "muon-lora", "adafactor-plain"] + ["adamw8bit-half"] * (find_spec("bitsandbytes") is not None)
    found = json.loads(run_script("sharded_optimizers.py", tmp_path, *cases))
    (_, norm), *ranks = found.pop("scale")
    assert found == {case: [0.0] * 3 for case in cases}
    assert ranks[0] == ranks[1]
    assert ranks[0] == [pytest.approx(15, abs=5), pytest.approx(norm, rel=0.02)]  # steps that both ranks skip
