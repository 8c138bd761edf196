"""docs/migration.md: every other name behaves as its row says."""

import math
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer as HuggingFaceTrainer

from ludic.errors import ConfigError
from ludic.recipes.foreign_names import ARGUMENTS, INSTEAD, OPENRLHF, OTHERS, REASONS, SETTINGS, VERL
from ludic.training import (
    ClippedSurrogateLoss,
    ReferenceKLLoss,
    SharedContext,
    TrainerConfig,
    TruncatedImportanceSampling,
    make_bradley_terry,
    make_grpo,
)
from ludic.training.backend.torch import build_optimizer
from ludic.types import Rollout, Step

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")


def test_other_names_raise_or_warn_as_documented():
    with pytest.raises(ConfigError, match="set max_seq_len and micro_token_budget"):
        TrainerConfig(grad_accum_steps=4)
    with pytest.raises(ConfigError, match="two names of one setting"):
        TrainerConfig(learning_rate=2e-5, lr=1e-5)
    with pytest.warns(DeprecationWarning, match="clip_eps_low"):
        assert ClippedSurrogateLoss(clip_eps=0.3).clip_eps_high == 0.3
    assert make_bradley_terry(lambda_regularization=0.1).loss == make_bradley_terry(regularization_lambda=0.1).loss


def test_a_removed_name_does_not_exist():
    assert "resolve_sampling_args" in PAGE
    assert not hasattr(import_module("ludic.inference"), "resolve_sampling_args")


def test_settings_by_model_size_are_valid():
    sizes = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \|", PAGE, flags=re.MULTILINE)
    assert len(sizes) == 4
    for longest, budget in sizes:
        TrainerConfig(max_seq_len=int(longest), micro_token_budget=int(budget)).validate()


def test_the_tables_of_names_are_those_of_the_errors():
    tables = "\n".join(write_tables())
    assert tables in PAGE, f"the tables of docs/migration.md must be:\n{tables}"


def test_the_measured_differences_are_those_of_the_page():
    page = " ".join(PAGE.split())
    assert "1.069 for 8" in page
    here, there = (
        advantage(make_grpo(group_size=8, normalize=kind).credit_assigner, [1, 0, 0, 0, 0, 1, 0, 0])
        for kind in ("population", "sample")
    )
    assert here / there == pytest.approx(math.sqrt(8 / 7), abs=1e-6)

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    decayed_there = HuggingFaceTrainer.get_decay_parameter_names(None, model)
    assert [name for name, _ in model.named_parameters() if name not in decayed_there] == [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    ]
    assert norm_after(model, TrainerConfig(lr=1e-3)) == pytest.approx(0.99, abs=1e-4)  # (1 - 1e-3 * 1e-2) ** 1000
    assert norm_after(model, TrainerConfig(lr=1e-3, decay_biases_and_norms=False)) == 1.0
    assert "is .99 after 1,000 steps" in page

    assert kl_gradient(None) == pytest.approx(2 * kl_gradient(TruncatedImportanceSampling()))
    assert "half of its gradient" in page

    for normalizer, mean in (("samples", 2.0), ("tokens", 1.0)):  # answers of 1 and 3 tokens, each with a KL of 1
        penalty = make_grpo(group_size=2, reference_kl=1.0, kl_estimator="k1", normalizer=normalizer).loss.terms[1].loss
        assert penalty.compute_from(shared_context(logp=1.0))[0].item() == mean
    assert "4 / 2 = 2, and one mean over all tokens 4 / 4 = 1" in page


def advantage(assigner, rewards):
    """The advantage of the first answer of a group."""
    rollouts = [Rollout(steps=[Step(0, "", "", None, r, False, True)], meta={"request_meta": {"group_id": "g"}}) for r in rewards]
    return assigner.compute(rollouts)[rollouts[0].id, 0]


def norm_after(model, cfg, steps=1000):
    """A norm's weight, 1 at first, after steps without a gradient."""
    weight = model.model.norm.weight
    with torch.no_grad():
        weight.fill_(1.0)
    optimizer = build_optimizer(model, cfg)
    weight.grad = torch.zeros_like(weight)
    for _ in range(steps):
        optimizer.step()
    return weight.detach()[0].item()


def shared_context(logp=0.0, correction=None):
    """Answers of 1 and 3 tokens, whose log-probabilities are above the reference's by `logp`. The
    sampler gave each token twice the probability, so that a correction's weight is 1/2."""
    mask = torch.tensor([[0.0, 1, 0, 0], [0, 1, 1, 1]])
    logits = torch.zeros(2, 4, 2, requires_grad=True)
    token = math.log(0.5)
    batch = {
        "input_ids": torch.zeros(2, 4, dtype=torch.long),
        "attention_mask": torch.ones(2, 4, dtype=torch.long),
        "action_mask": mask,
        "weight": torch.ones(2),
        "actor_logps": mask * (token + math.log(2)),
        "proximal_logps": mask * token,
        "reference_logps": mask * (token - logp),
    }
    return SharedContext(logits, batch, correction=correction)


def kl_gradient(correction):
    """The size of the gradient of the KL term."""
    shared = shared_context(logp=1.0, correction=correction)
    loss, _ = ReferenceKLLoss(1.0).compute_from(shared)
    loss.backward()
    return float(shared.logits.grad.abs().sum())


def write_tables():
    """The tables of the page, from `ludic.recipes.foreign_names`."""
    columns = [group(table) for table in (SETTINGS, VERL, OPENRLHF)]
    yield from ["| ludic | TRL, transformers, flat files | verl 0.9.1 | OpenRLHF 0.11.2 |", "|---|---|---|---|"]
    for ours in dict.fromkeys(ours for column in columns for ours in column):
        cells = [ours.split(","), *(column.get(ours, []) for column in columns)]
        yield "| " + " | ".join(code(cell) for cell in cells) + " |"
    library = "TRL, transformers"
    for whose, title, table in (
        (library, "write", INSTEAD),
        (library, "there is no such setting", REASONS),
        ("verl, OpenRLHF", "here", OTHERS),
        ("arguments of TRL's trainers", "in Python", ARGUMENTS),
    ):
        yield from ["", f"| {whose} | {title} |", "|---|---|"]
        yield from (f"| {code(names)} | {text} |" for text, names in group(table).items())


def group(table):
    groups = {}
    for name, ours in table.items():
        groups.setdefault(ours, []).append(name)
    return groups


def code(names):
    return ", ".join(f"`{name}`" for name in names)
