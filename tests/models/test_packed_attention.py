"""Packed sequences: the same gradient as with padding, no attention mask of the whole row, and only
for models that keep sequences apart."""

import logging
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from small_models import model_with_hidden_windows
from torch import nn
from training_samples import ListSource, assert_same_tensors, cpu_config, gradients_of, sorting_items, tiny_model

from ludic import _core
from ludic.models import packed_attention as kernels
from ludic.models.packed_attention import (
    PACKED,
    SequenceGroups,
    get_attention,
    make_packed_keywords,
    packed_attention,
    set_attention,
)
from ludic.training import MaskedCausalLMCrossEntropyLoss, RLAlgorithm, SAWItem, Trainer, collate_saw_items
from ludic.training.algorithm import forward_logits
from ludic.training.backend.torch import enable_checkpointing
from ludic.training.batching.packing import to_tensors
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.evaluators.held_out import HeldOutLoss
from ludic.training.preflight.layouts import with_right_layout

ALGO = RLAlgorithm("supervised", ConstantCredit(1.0), MaskedCausalLMCrossEntropyLoss())
SMALL = {
    "vocab_size": 259,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def make_model_of_kind(kind):
    import transformers

    torch.manual_seed(0)
    if kind == "qwen2 with windows":
        return tiny_model(use_sliding_window=True, sliding_window=5, max_window_layers=0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=259, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2)
        return transformers.GPT2LMHeadModel(config).eval()
    if kind == "mistral with windows":
        config = transformers.MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=5)
        return transformers.MistralForCausalLM(config)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1))
    return tiny_model()


def packed_batch(items):
    return to_tensors(_core.SampleTable.from_items(items).collate_padding_free(list(range(len(items)))), "cpu")


def of_length(length):
    return SAWItem([5] * length, [1] * length, [0] + [1] * (length - 1), 1.0)


def gradient(model, batch):
    model.zero_grad(set_to_none=True)
    ALGO.compute_loss(model, batch)[0].backward()
    return gradients_of(model)


@pytest.mark.parametrize("kind", ["qwen2", "qwen2 with windows", "mistral with windows", "llama", "gpt2"])
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), count=st.integers(1, 9), checkpointing=st.booleans())
def test_the_gradient_equals_that_of_the_padded_batch(kind, seed, count, checkpointing):
    items, model = sorting_items(count, seed=seed, weight=1.0), make_model_of_kind(kind)
    expected = gradient(model, collate_saw_items(items, pad_token_id=0, device="cpu"))
    assert with_right_layout(cpu_config(packing="padding_free"), model).packing == "padding_free"
    if checkpointing:
        model.train()
        enable_checkpointing(model)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    scale = max(tensor.abs().max().item() for tensor in expected.values())
    assert_same_tensors(gradient(model, packed_batch(items)), expected, atol=2e-6 * max(1.0, scale))


def test_no_mask_of_the_whole_row_is_built(monkeypatch):
    from transformers.integrations import sdpa_attention

    model, seen = tiny_model(), []
    with_right_layout(cpu_config(packing="padding_free"), model)
    attend = sdpa_attention.sdpa_attention_forward

    def noted(module, query, key, value, attention_mask, **options):
        seen.append((query.shape[0], query.shape[2], attention_mask))
        return attend(module, query, key, value, attention_mask, **options)

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", noted)
    # 40 - 20 = 20 > max(16, 10) ends the first group, 20 - 3 > 16 the second.
    forward_logits(model, packed_batch([of_length(length) for length in (3, 40, 20, 33, 2)]))
    assert seen == [(2, 40, None), (1, 20, None), (2, 3, None)] * 2  # two layers


@given(st.lists(st.integers(1, 90), min_size=1, max_size=30))
def test_grouped_sequences_are_returned_to_their_positions(lengths):
    row = torch.arange(float(sum(lengths)))[None, None, :, None].expand(1, 2, -1, 3)
    groups = SequenceGroups.from_lengths(lengths, torch.device("cpu"))
    parts = groups.pad(row)
    assert [(part.shape[0], part.shape[2]) for part in parts] == list(groups.shapes)
    assert torch.equal(groups.join([part.transpose(1, 2) for part in parts]), row.transpose(1, 2))
    for part in parts:  # each padded row is one sequence, in order, plus its last token again
        assert ((part[:, 0, 1:, 0] - part[:, 0, :-1, 0]) <= 1).all()


def test_a_model_with_packed_attention_still_runs_padded_batches_and_saves_unchanged(tmp_path):
    model, other = tiny_model(), tiny_model()
    set_attention(other, PACKED)
    batch = collate_saw_items(sorting_items(5), pad_token_id=0, device="cpu")
    assert torch.equal(forward_logits(other, batch), forward_logits(model, batch))
    other.save_pretrained(tmp_path)
    assert PACKED not in (tmp_path / "config.json").read_text()


def test_a_wrapped_model_keeps_its_sequences_apart():
    class Wrapper(nn.Module):
        """Like DistributedDataParallel, it hides the config and attributes of the inner model."""

        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, **keywords):
            return self.module(**keywords)

    model, batch = tiny_model(), packed_batch(sorting_items(5))
    for name in ("sdpa", PACKED):
        set_attention(model, name)
        torch.testing.assert_close(forward_logits(Wrapper(model), batch), forward_logits(model, batch))


def test_flash_attention_receives_the_sequence_boundaries():
    model = tiny_model()
    model.config._attn_implementation_internal = "flash_attention_2"  # not installed here, and not called
    lengths = [len(item.input_ids) for item in sorting_items(3)]
    keywords = make_packed_keywords(model, packed_batch(sorting_items(3)))
    assert (
        keywords["cu_seq_lens_q"].tolist() == keywords["cu_seq_lens_k"].tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    )
    assert keywords["cu_seq_lens_q"].dtype == torch.int32
    assert keywords["max_length_q"] == keywords["max_length_k"] == max(lengths)
    assert keywords["attention_mask"] is None
    assert "sequence_groups" not in keywords


@pytest.mark.parametrize("window", [None, 4])
def test_the_cuda_kernel_receives_valid_arguments(window):
    """Only shapes and dtypes are checked, since there is no CUDA device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = (torch.empty(1, heads, 9, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        bounds = torch.empty(3, dtype=torch.int32, device="cuda")
        groups = SequenceGroups(bounds, ((2, 5),), bounds)
        options = {"cu_seq_lens_q": bounds, "max_length_q": 5, "scaling": 0.25, "dropout": 0.0}
        attended, _ = packed_attention(
            nn.Module(), query, key, value, None, sequence_groups=groups, sliding_window=window, **options
        )
    assert attended.shape == (1, 9, 4, 16)
    assert attended.dtype == torch.bfloat16
    assert attended.device.type == "cuda"


class Bigram(nn.Module):
    """Not a transformers model."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(259, 259)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        return self.table(input_ids)


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=259, hidden_size=16, num_hidden_layers=2, initializer_range=0.2))
    model.config._attn_implementation = "sdpa"  # which it has none of
    return model


def eager():
    model = tiny_model()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Bigram, "is not a transformers model"),
        (mamba, "MambaForCausalLM (has other logits|does not accept)"),
        (eager, 'attn_implementation="eager" would build a mask'),
        (model_with_hidden_windows, "windows of which only its mask knows"),
    ],
)
def test_unsupported_models_get_padded_batches_and_one_line_explains_why(make, reason, caplog):
    model, items = make(), sorting_items(6, weight=1.0)
    cfg = cpu_config(packing="padding_free")
    before = get_attention(model)
    with caplog.at_level(logging.WARNING):
        trainer = Trainer(model=model, algo=ALGO, batch_source=ListSource(items), cfg=cfg)
        HeldOutLoss(model, items, cfg).measure()
    lines = [record.getMessage() for record in caplog.records if "padding_free" in record.getMessage()]
    [line] = lines
    assert 'replaced by "optimal"' in line
    assert re.search(reason, line)
    assert trainer.cfg.packing == "optimal"
    assert get_attention(model) == before
    trainer.train_step_sync()


def test_a_model_that_ignores_position_ids_gets_padded_batches():
    model = tiny_model()
    inner = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: inner(x, torch.arange(x.shape[1])[None])
    assert with_right_layout(cpu_config(packing="padding_free"), model).packing == "padding_free"  # RoPE is relative
    absolute = make_model_of_kind("gpt2")
    positions = absolute.transformer.wpe.forward
    absolute.transformer.wpe.forward = lambda ids: positions(torch.arange(ids.shape[1])[None])
    assert with_right_layout(cpu_config(packing="padding_free"), absolute).packing == "optimal"


def stub_varlen(shares_heads):
    """`varlen_attn` of torch 2.13, and without `enable_gqa` that of 2.11, by sdpa."""

    def attend(q, k, v, bounds_q, bounds_k, most_q, most_k, *, scale, window_size, enable_gqa=False):
        assert enable_gqa or q.shape[1] == k.shape[1]
        assert window_size == (-1, 0)
        parts = []
        for begin, end in pairwise(bounds_q.tolist()):
            one = (tensor[begin:end].transpose(0, 1)[None] for tensor in (q, k, v))
            parts.append(
                torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True, scale=scale, enable_gqa=enable_gqa)
            )
        return torch.cat(parts, dim=2)[0].transpose(0, 1)

    def attend_2_11(q, k, v, bounds_q, bounds_k, most_q, most_k, *, scale, window_size):
        return attend(q, k, v, bounds_q, bounds_k, most_q, most_k, scale=scale, window_size=window_size)

    return attend if shares_heads else attend_2_11


@pytest.mark.parametrize("shares_heads", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_kernel_of_a_gpu_is_called_with_and_without_shared_heads(monkeypatch, shares_heads, kv_heads):
    from torch.nn.attention import varlen

    def logits():
        with torch.no_grad():
            return forward_logits(model, packed)

    torch.manual_seed(0)
    model = tiny_model(hidden_size=32, num_attention_heads=4, num_key_value_heads=kv_heads)
    set_attention(model, PACKED)
    packed = packed_batch(sorting_items(6, seed=1))
    want = logits()
    called = []
    kernel = stub_varlen(shares_heads)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(kernels, "_has_kernel", lambda *args: called.append(args) or True)
    kernels._find_varlen.cache_clear()
    try:
        torch.testing.assert_close(logits(), want)
    finally:
        kernels._find_varlen.cache_clear()
    assert called


def test_a_torch_whose_kernel_has_no_windows_is_left_to_sdpa(monkeypatch):
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, is_causal: q)
    kernels._find_varlen.cache_clear()
    try:
        assert kernels._find_varlen() == (None, False)
    finally:
        kernels._find_varlen.cache_clear()
