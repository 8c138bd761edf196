"""The count equals FlopCounterMode's, for models of several architectures, packings and losses."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from preference_samples import dpo_config, reward_model, sorted_pairs
from small_models import make_from_config
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from training_samples import branching_items, cpu_config, sorting_items

from ludic.models.flops import MEASURED_EVERY, FlopCounter, reported_products
from ludic.models.packed_attention import PACKED, set_attention
from ludic.training import LoraSettings, RLAlgorithm, apply_lora, make_bradley_terry, make_dpo, make_grpo, make_sft
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.pair_batches import PreferenceMacroBatch, PreferenceMiniBatch
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import MaskedCausalLMCrossEntropyLoss

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {
    **SIZES,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
MODELS = {
    "Qwen2": SIZES,
    "Llama": SIZES,
    "Gemma": {**SIZES, "head_dim": 24},
    "Qwen2Moe": EXPERTS,
    "Mixtral": {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2},
    "GPT2": {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "pad_token_id": 0},
}
SUPERVISED = RLAlgorithm("supervised", ConstantCredit(1.0), MaskedCausalLMCrossEntropyLoss())


def make_model(architecture, attention=PACKED):
    model = make_from_config(architecture, "ForCausalLM", MODELS[architecture], 0)
    if attention is not None:
        set_attention(model, attention)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # FlopCounterMode counts no grouped product
    return model.train()


def mini_batches(items, cfg, kind=MiniBatch):
    """Two mini-batches with other shapes: the first is measured, the second calculated."""
    macro = MacroBatch.ingest(items, cfg.max_seq_len)
    rows = np.arange(len(macro.items))
    return [kind(macro, part, cfg) for part in (rows[: len(rows) // 3], rows[len(rows) // 3 :])]


def count(backend, batches):
    """(ours, FlopCounterMode's) of forward and backward passes over the last of `batches`."""
    for batch in batches[:-1]:
        asyncio.run(backend.forward_backward(batch, totals=batch.totals).result())
    before = backend.flops.total
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        asyncio.run(backend.forward_backward(batches[-1], totals=batches[-1].totals).result())
    return backend.flops.total - before, counted.get_total_flops()


def assert_counted(model, algo, items, *, kind=MiniBatch, **changes):
    cfg = cpu_config(**{"logits": "full", "max_seq_len": 64, "micro_token_budget": 256, "prefix_sharing": "off", **changes})
    ours, torchs = count(TorchBackend(model, cfg, algo=algo), mini_batches(items, cfg, kind))
    assert ours == pytest.approx(torchs, rel=0.01)
    return ours


@pytest.mark.parametrize("packing", ["optimal", "padding_free"])
@pytest.mark.parametrize("architecture", MODELS)
def test_the_count_is_that_of_torch(architecture, packing):
    assert_counted(make_model(architecture), SUPERVISED, sorting_items(24), packing=packing)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_of_transformers_is_counted(attention):
    assert_counted(make_model("Qwen2", attention), SUPERVISED, sorting_items(24))


def test_products_with_named_factors_are_counted():
    """Bloom calls `alibi.baddbmm(batch1=, batch2=)`."""
    model = make_from_config("Bloom", "ForCausalLM", {"vocab_size": 320, "hidden_size": 64, "n_layer": 2, "n_head": 4}, 0).train()
    assert_counted(model, SUPERVISED, sorting_items(24))
    counter, rows = FlopCounter(model), torch.ones(2, 3)
    with counter.counting("x", tokens=2, pairs=4, backward=False):
        torch.matmul(input=rows, other=torch.ones(3, 5))
        torch.addmm(torch.ones(5), mat1=rows, mat2=torch.ones(3, 5))
        torch.einsum("ij,jk->ik", rows, torch.ones(3, 5))
    assert counter.total == 3 * 2 * 2 * 3 * 5


def test_a_shared_prefix_is_counted_once():
    items = branching_items([4, 3, 5, 4, 3, 5])
    model = make_model("Qwen2")
    trees = assert_counted(model, make_grpo(group_size=4), items, kind=TreeMiniBatch, prefix_sharing="tree")
    rows = assert_counted(make_model("Qwen2"), make_grpo(group_size=4), items, packing="padding_free")
    assert trees < 0.9 * rows


def test_frozen_weights_under_adapters_have_no_gradient_of_their_own():
    whole = assert_counted(make_model("Qwen2"), SUPERVISED, sorting_items(24))
    model = apply_lora(make_model("Qwen2"), LoraSettings(rank=4))
    adapted = assert_counted(model, SUPERVISED, sorting_items(24))
    assert 0.6 * whole < adapted < 0.85 * whole  # two of three products, and the adapters


def test_activation_checkpointing_adds_no_model_flops():
    items = sorting_items(24)
    cfg = cpu_config(logits="full", prefix_sharing="off")
    plain, torchs = count(TorchBackend(make_model("Llama"), cfg, algo=SUPERVISED), mini_batches(items, cfg))
    model = make_model("Llama")
    backend = TorchBackend(model, cfg, algo=SUPERVISED, enable_gradient_checkpointing=True)
    again, more = count(backend, mini_batches(items, cfg))
    assert plain == pytest.approx(torchs, rel=0.01)
    assert more > 1.2 * torchs
    assert again == pytest.approx(plain, rel=0.01)


def test_the_output_layer_is_counted_at_its_tokens():
    """Three products [N, D] x [D, V]. FlopCounterMode has three, too: it counts the tiles that the
    backward pass computes again, and not the gradient that `addmm_` adds to."""
    cfg = cpu_config(logits="chunked", max_seq_len=64, micro_token_budget=256, prefix_sharing="off")
    model = make_model("Qwen2")
    batches = mini_batches(sorting_items(24), cfg)
    backend = TorchBackend(model, cfg, algo=make_grpo(group_size=4))
    ours, torchs = count(backend, batches)
    assert ours == pytest.approx(torchs, rel=0.01)
    scored = sum(int(micro.tensors["action_mask"][:, 1:].sum()) for micro in batches[-1])
    computed = sum(micro.tensors["input_ids"].numel() for micro in batches[-1])
    full, _ = count(TorchBackend(model, replace(cfg, logits="full"), algo=make_grpo(group_size=4)), batches)
    assert full - ours == pytest.approx(6 * (computed - scored) * 64 * 320, rel=0.01)


@pytest.mark.parametrize("algo", [make_dpo(beta=0.5), make_bradley_terry()], ids=["dpo", "reward"])
def test_pairs_are_counted(algo):
    scored = reward_model(hidden_size=64, intermediate_size=160, num_attention_heads=4)
    model = make_model("Qwen2") if algo.reads_reference else scored
    cfg = dpo_config(logits="full", prefix_sharing="off")
    macro = PreferenceMacroBatch.ingest_pairs(sorted_pairs(12), cfg.max_seq_len)
    if algo.reads_reference:
        logps = {row: torch.zeros(sum(item.action_mask)) for row, item in enumerate(macro.items)}
        macro = replace(macro, token_columns={"reference_logps": logps})
    batches = [PreferenceMiniBatch(macro, rows, cfg) for rows in (np.arange(8), np.arange(8, len(macro.items)))]
    ours, torchs = count(TorchBackend(model, cfg, algo=algo), batches)
    assert ours == pytest.approx(torchs, rel=0.01)


def test_passes_without_gradient_have_no_backward_pass():
    cfg = cpu_config(logits="full", prefix_sharing="off")
    backend = TorchBackend(make_model("Qwen2"), cfg, algo=make_sft())
    micro_batch = next(iter(mini_batches(sorting_items(12), cfg)[0]))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        backend.forward_logprobs(micro_batch)
    assert backend.flops.total == pytest.approx(counted.get_total_flops(), rel=0.01)


def test_products_are_counted_by_hand():
    """[3, 5] x [5, 7] has 2 * 3 * 5 * 7 = 210 FLOPs; with the gradient of the weights alone 420."""
    layer, rows = nn.Linear(5, 7, bias=False), torch.ones(3, 5)
    for backward, flops in ((False, 210), (True, 420)):
        counter = FlopCounter(layer)
        with counter.counting("x", tokens=3, pairs=9, backward=backward):
            layer(rows)
            torch.nn.functional.relu(rows)
        assert counter.total == flops
        assert counter.dtype == torch.float32


@pytest.mark.parametrize(
    ("compute", "flops"),
    [
        (lambda a, b: a @ b, 2 * 2 * 3 * 5 * 7),
        (lambda a, b: torch.einsum("bik,bkj->bij", a, b), 2 * 2 * 3 * 5 * 7),
        (lambda a, b: torch.einsum("bik,bkj->ij", a, b), 2 * 2 * 3 * 5 * 7),
        (lambda a, b: torch.baddbmm(torch.zeros(2, 3, 7), a, b), 2 * 2 * 3 * 5 * 7),
        (lambda a, b: nn.functional.conv1d(a, torch.ones(4, 3, 2)), 2 * (2 * 4 * 4) * (3 * 2)),
    ],
)
def test_every_way_to_multiply_is_counted(compute, flops):
    counter = FlopCounter(nn.Identity())
    with counter.counting("x", tokens=6, pairs=36, backward=False):
        compute(torch.ones(2, 3, 5), torch.ones(2, 5, 7))
    assert counter.total == pytest.approx(flops)


def test_a_calculated_pass_grows_with_its_size():
    """40 per token, then 80 tokens of 40."""
    layer, counter = nn.Linear(4, 5, bias=False), FlopCounter(nn.Identity())
    with counter.counting("x", tokens=2, pairs=4, backward=False):
        layer(torch.ones(2, 4))
    with counter.counting("x", tokens=80, pairs=6400, backward=False):
        pass
    assert counter.total == 80 + 3200


def test_a_model_that_is_unfrozen_is_measured_again():
    layer = nn.Linear(4, 5, bias=False).requires_grad_(False)
    counter = FlopCounter(layer)
    for _ in range(MEASURED_EVERY):
        with counter.counting("x", tokens=1, pairs=1, backward=True):
            layer(torch.ones(1, 4))
    layer.requires_grad_(True)
    before = counter.total
    with counter.counting("x", tokens=1, pairs=1, backward=True):
        layer(torch.ones(1, 4))
    assert (before, counter.total - before) == (MEASURED_EVERY * 40, 80)


def test_nothing_is_counted_outside_and_in_compiled_modules():
    layer = nn.Linear(4, 5)
    layer.compile(backend="eager")
    counter = FlopCounter(nn.Sequential(layer))
    with counter.counting("x", tokens=1, pairs=1, backward=True), reported_products([torch.ones(2, 4)], [torch.ones(5, 4)]):
        pass
    assert counter.total == 0.0
