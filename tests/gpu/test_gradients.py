"""Gradients on a GPU equal those on the CPU: every loss, layout and way to compute logits."""

import re

import pytest
import torch
from device_steps import gradients_on, largest
from training_samples import assert_same_tensors, branching_items, sorting_items, tiny_model

from ludic.models.packed_attention import PACKED, get_attention, set_attention
from ludic.training.loss import (
    CISPOLoss,
    ClippedSurrogateLoss,
    CompositeLoss,
    EntropyBonus,
    LossTerm,
    MaskedCausalLMCrossEntropyLoss,
    ReinforceBaselineLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
)
from ludic.training.loss.gmpo import GMPOLoss
from ludic.training.loss.sapo import SAPOLoss

pytestmark = pytest.mark.gpu

LOSSES = {
    "reinforce_baseline": ReinforceBaselineLoss(normalize=True),
    "gspo": ClippedSurrogateLoss(clip_eps_low=0.5, clip_eps_high=0.5, length_normalize=True),
    "grpo": TokenClippedSurrogateLoss(ratio_clip=10.0),
    "dapo": TokenClippedSurrogateLoss(normalizer="tokens"),
    "cispo": CISPOLoss(),
    "gmpo": GMPOLoss(),
    "sapo": SAPOLoss(),
    "token_kl": TokenKLLoss(coeff=1.0),
    "entropy": EntropyBonus(coeff=1.0),
    "supervised": MaskedCausalLMCrossEntropyLoss(),
    "composite_entropy": CompositeLoss([LossTerm("pg", CISPOLoss()), LossTerm("h", EntropyBonus(0.1))]),
}
GRPO = LOSSES["grpo"]


def policy(**changes):
    """Heads of 16, the narrowest that FlexAttention takes."""
    return tiny_model(hidden_size=32, **changes)


def assert_same_step(items, loss, *, atol=1e-4, make=policy, **options):
    want, want_loss, _ = gradients_on("cpu", make(), items, loss, logits="full")
    got, got_loss, _ = gradients_on("cuda", make(), items, loss, **options)
    assert_same_tensors(got, want, atol=atol * max(1.0, largest(want)))
    assert got_loss == pytest.approx(want_loss, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("logits", ["full", "chunked"])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_the_gradient_of_the_cpu(name, logits):
    assert_same_step(sorting_items(12, seed=3), LOSSES[name], logits=logits)


@pytest.mark.parametrize("logits", ["full", "chunked"])
@pytest.mark.parametrize("windows", [{}, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}])
def test_rows_without_padding_have_the_gradient_of_padded_rows(windows, logits):
    items = sorting_items(12, seed=5)
    assert_same_step(items, GRPO, make=lambda: policy(**windows), packing="padding_free", logits=logits)


def relative_error(got, want):
    """The norm of the difference of two gradients, of the norm of the second."""
    squares = sum(float((got[name].double() - want[name].double()).square().sum()) for name in want)
    return (squares / sum(float(value.double().square().sum()) for value in want.values())) ** 0.5


@pytest.mark.parametrize("logits", ["full", "chunked"])
@pytest.mark.parametrize("options", [{}, {"packing": "padding_free"}, {"prefix_sharing": "tree"}])
def test_in_bfloat16_the_gradient_differs_by_its_rounding(options, logits):
    """bfloat16 has 8 bits: a number is rounded by at most 2^-9 = 0.2 %. What a few layers make of
    that stays below 5 %; a wrong mask or shift gives an error of about 100 %."""
    items = branching_items((6, 5), 3)
    want, _, _ = gradients_on("cpu", policy(), items, GRPO, logits="full")
    got, _, _ = gradients_on("cuda", policy(), items, GRPO, logits=logits, mixed_precision_dtype="bf16", **options)
    assert relative_error(got, want) < 0.05
    other, _, _ = gradients_on("cpu", policy(), branching_items((6, 5), 4), GRPO, logits="full")
    assert relative_error(other, want) > 0.5


WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}


@pytest.mark.parametrize("attention", ["flex", "sdpa"])
@pytest.mark.parametrize("windows", [{}, WINDOWS])
@pytest.mark.parametrize("seed", range(4))
def test_prefix_trees_have_the_gradient_of_rows_of_their_own(attention, windows, seed):
    def prepare(model):
        assert get_attention(model) == "ludic_packed_flex"
        if attention == "sdpa":
            set_attention(model, PACKED)

    items = branching_items((9, 6, 1), seed)
    assert_same_step(items, GRPO, make=lambda: policy(**windows), prefix_sharing="tree", prepare=prepare)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_can_be_computed_on_trees(name):
    assert_same_step(branching_items((9, 6), 8), LOSSES[name], prefix_sharing="tree", logits="chunked")


def test_checkpointed_activations_of_trees_have_the_same_gradient():
    from ludic.training.backend.torch import enable_checkpointing

    def prepare(model):
        model.train()
        enable_checkpointing(model)

    assert_same_step(branching_items((9, 6), 2), GRPO, prefix_sharing="tree", prepare=prepare)


def test_heads_too_narrow_for_flex_attention_are_left_to_sdpa(caplog):
    """torch's kernel needs heads of at least 16; these have 8."""
    with caplog.at_level("INFO", "ludic.training.preflight.layouts"):
        assert_same_step(branching_items((5, 4), 1), GRPO, make=tiny_model, prefix_sharing="tree")
    lines = [record.getMessage() for record in caplog.records if "FlexAttention" in record.getMessage()]
    assert len(lines) == 1
    assert re.search("sdpa, not by FlexAttention: Qwen2ForCausalLM .*trees", lines[0])


def test_rows_of_all_lengths_are_computed_by_few_compiled_kernels():
    from torch._dynamo.utils import counters

    def graphs():
        return counters["stats"]["unique_graphs"]

    model = policy(max_position_embeddings=2048)

    def step(groups, seed):
        gradients_on("cuda", model, branching_items(groups, seed), GRPO, prefix_sharing="tree", logits="chunked")

    # torch compiles for the first number of blocks of 128 tokens, and once more for all others:
    # here 2 blocks, and 3.
    step((30, 20), 0)
    step(tuple(range(1, 11)), 2)
    before = graphs()
    for seed in range(8):
        step(tuple(range(1, 4 * seed + 3)), seed)
    assert graphs() == before


def test_the_gradient_does_not_depend_on_padding_that_sees_nothing():
    """Some kernels of sdpa return nan for a query without a key."""
    windows = {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0}
    model = policy(**windows)
    items = branching_items((9, 6, 3), 7)
    got, _, _ = gradients_on("cuda", model, items, GRPO, prefix_sharing="tree", prepare=lambda m: set_attention(m, PACKED))
    assert all(torch.isfinite(gradient).all() for gradient in got.values())
