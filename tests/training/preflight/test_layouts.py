"""A layout in which a model computes samples otherwise than alone is replaced, or refused, and one
line says why."""

import asyncio
import logging
import re

import numpy as np
import pytest
import torch
from small_architectures import make_architecture
from small_models import LLAMA, make_from_config, mixture_model
from tiny_vision import make_tiny_qwen2_vl
from training_samples import ListSource, assert_same_tensors, branching_items, cpu_config, gradients_of, tiny_model

from ludic.errors import ConfigError
from ludic.models.images.support import ImageSupport
from ludic.models.packed_attention import get_attention
from ludic.training import MaskedCausalLMCrossEntropyLoss, RLAlgorithm, Trainer
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.preflight import layouts
from ludic.training.preflight.layouts import (
    LENGTHS,
    SHARED,
    can_compute_trees,
    find_fault,
    find_precision,
    measure_rounding,
    with_right_layout,
)
from ludic.training.rm_config import DPOTrainerConfig

ALGO = RLAlgorithm("supervised", ConstantCredit(1.0), MaskedCausalLMCrossEntropyLoss())
LAYOUTS = ("padded rows", "concatenated sequences", "trees")


class Anticipating(torch.nn.Module):
    """Adds to each token how many places its row has behind it, padding included."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids, attention_mask=None, **options):
        behind = torch.arange(input_ids.shape[1] - 1, -1, -1)[None, :, None]
        states = self.inner.model.embed_tokens(input_ids) + 0.1 * behind
        return self.inner(inputs_embeds=states, attention_mask=attention_mask, **options)


def test_a_model_that_reads_padding_gets_samples_of_one_length(caplog):
    items = branching_items((5, 4), 2)
    gradients = {}
    for name, rows in (("alone", [[row] for row in range(9)]), ("trainer", [list(range(9))])):
        model = Anticipating(tiny_model())
        trainer = Trainer(model=model, algo=ALGO, batch_source=ListSource(items), cfg=cpu_config(prefix_sharing="off"))
        macro = MacroBatch.ingest(items, trainer.cfg.max_seq_len)
        totals = MiniBatch(macro, np.arange(9), trainer.cfg).totals
        for each in rows:
            mini_batch = MiniBatch(macro, np.array(each), trainer.cfg)
            assert all(batch.tensors["attention_mask"].all() for batch in mini_batch)
            asyncio.run(trainer.backend.forward_backward(mini_batch, totals=totals).result())
        gradients[name] = gradients_of(model)
    assert_same_tensors(gradients["trainer"], gradients["alone"], atol=1e-5)
    said = {record.getMessage() for record in caplog.records if record.levelno == logging.WARNING}
    assert "Anticipating has other logits for padded rows" in str(said)


class WithLogits(torch.nn.Module):
    """Gives its logits [B, T, V] to `change`, with the attention mask."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.config, self.change = inner, inner.config, change

    def forward(self, input_ids, attention_mask=None, **options):
        output = self.inner(input_ids, attention_mask=attention_mask, **options)
        self.change(output.logits, attention_mask)
        return output


def test_nan_that_only_a_layout_has_is_a_fault():
    def spoil(logits, mask):
        logits[~mask.all(dim=-1), 2] = torch.nan

    reason = find_fault(WithLogits(tiny_model(), spoil), cpu_config(), "padded rows")
    assert re.search("WithLogits .*padded rows .*samples alone", reason)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.finfo(torch.float32).min])
def test_logits_of_tokens_that_a_model_forbids_neither_are_a_fault_nor_hide_one(value):
    def forbid(logits, mask):
        logits[..., 7] = value

    assert find_fault(WithLogits(tiny_model(), forbid), cpu_config(), "padded rows") is None
    assert "other logits" in find_fault(WithLogits(Anticipating(tiny_model()), forbid), cpu_config(), "padded rows")


def test_a_model_that_does_not_accept_padding_gets_samples_of_one_length(caplog):
    def refuse(logits, mask):
        if not mask.all():
            raise ValueError("padding is not supported")

    assert with_right_layout(cpu_config(), WithLogits(tiny_model(), refuse)).overhead_tokens == 0
    assert "padded rows (ValueError: padding is not supported)" in caplog.text


def test_pairs_need_padding():
    cfg = DPOTrainerConfig(model_device="cpu", pad_token_id=0, max_seq_len=64, micro_token_budget=256)
    with pytest.raises(ConfigError, match=r"logits for padded rows .*pairs"):
        with_right_layout(cfg, Anticipating(tiny_model()))


def test_a_model_that_reads_the_tokens_it_predicts_is_named(caplog):
    assert find_fault(make_architecture("xlnet"), cpu_config(), "padded rows") is None
    assert "XLNetLMHeadModel reads the tokens that it predicts" in caplog.text


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_chunks_of_which_only_the_mask_knows_count_if_samples_can_exceed_them(layout):
    for size, reason in ((16, "windows of which only its mask knows"), (64, None)):
        model = make_architecture("llama4_text", attention_chunk_size=size)
        found = find_fault(model, cpu_config(max_seq_len=64), layout, attention="ludic_packed")
        assert re.search(f"^Llama4ForCausalLM .*{reason}$", found) if reason else found is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_fault(layout, dtype):
    """Also where it changes the choice of an expert."""
    for model in (mixture_model("DeepseekV3"), make_from_config("Qwen3", "ForCausalLM", {**LLAMA, "head_dim": 8}, 0)):
        attention = None if layout == "padded rows" else "ludic_packed"
        assert find_fault(model.to(dtype), cpu_config(), layout, attention=attention) is None


def test_rounding_is_measured_where_samples_begin_alike():
    """A logit of 30 is rounded to a multiple of 1/8 in bfloat16: what a pass of another length
    changes by two of these is rounding, but by twenty it is not."""
    alone = [torch.zeros(length, 4) for length in LENGTHS]
    alone[-1][:, 0] = 30.0
    for one, shared in zip(alone, SHARED, strict=True):
        one[:shared, 0] = 30.0
    precision = 2.0**-7  # a rounding of 30 is 30 / 128 at most
    assert measure_rounding(alone, precision) == 0.0
    alone[2][:, 0] += 0.25  # five tokens that it shares with the last sample
    assert measure_rounding(alone, precision) == 4 * 0.25
    alone[2][:, 0] += 4.75
    assert measure_rounding(alone, precision) == 8 * 30 / 128
    assert measure_rounding(alone, 2.0**-23) < 1e-4  # in float32


def test_the_precision_is_that_of_the_forward_pass():
    model = tiny_model()
    assert find_precision(model, cpu_config()) == 2.0**-23
    assert find_precision(model, cpu_config(mixed_precision_dtype="bf16")) == 2.0**-7
    assert find_precision(model.to(torch.bfloat16), cpu_config()) == 2.0**-7


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rounding_of_a_deep_model_is_no_fault(layout, monkeypatch):
    """One whose logits hardly depend on other tokens, so that rounding is all there is."""
    settings = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 24, "intermediate_size": 64}
    model = make_from_config("Llama", "ForCausalLM", {**LLAMA, **settings, "initializer_range": 0.02}, 0).to(torch.bfloat16)
    monkeypatch.setattr(layouts, "DIFFERENCE", 0.0)
    attention = None if layout == "padded rows" else "ludic_packed"
    assert find_fault(model, cpu_config(), layout, attention=attention) is None


@pytest.mark.parametrize("error", [False, True])
def test_a_layout_that_is_wrong_for_images_is_replaced(monkeypatch, caplog, error):
    """A model that cannot be trained on images may be trained on text."""
    model, _ = make_tiny_qwen2_vl()
    cfg = cpu_config(packing="padding_free")
    reasons = {"padding_free": "it mixes images in rows", "trees": "it mixes images in trees"}

    def check(*_):
        if error:
            raise ConfigError("it does not read images")
        return ImageSupport(("padded",), reasons=reasons)

    with monkeypatch.context() as patch:
        patch.setattr(layouts, "check_images", check)
        assert with_right_layout(cfg, model).packing == "optimal"
        assert not can_compute_trees(model, cfg)
        assert get_attention(model) == "sdpa"
        assert ("does not read images" if error else "mixes images in rows") in caplog.text
    assert with_right_layout(cfg, model) is cfg
    assert can_compute_trees(model, cfg)
