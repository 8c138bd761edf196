"""Quantised weights under adapters: what is stored, computed, trained, published and saved. Those
of 4 bits need bitsandbytes, which `.ci/run` has in a step of its own."""

import copy
import json
import logging
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from torch import nn
from training_samples import ListSource, cpu_config, sorting_items, tiny_model

from ludic.errors import ConfigError, MissingExtraError
from ludic.models.adapters import list_merged
from ludic.models.loading import load_model
from ludic.models.lora import describe_trained_share, load_adapter, save_adapter, save_merged
from ludic.models.published import copy_for_sampling, published_weights
from ludic.models.quantization import (
    QuantizationSettings,
    count_weights,
    dequantize_weight,
    describe_weight,
    find_quantized_layers,
    quantize_layers,
)
from ludic.training import LoraSettings, Trainer, apply_lora, make_grpo

NEEDED = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
INT8 = QuantizationSettings("int8")
ALL = [
    pytest.param(QuantizationSettings("nf4"), marks=NEEDED, id="nf4"),
    pytest.param(QuantizationSettings("nf4", double=True), marks=NEEDED, id="nf4 double"),
    pytest.param(QuantizationSettings("fp4"), marks=NEEDED, id="fp4"),
    pytest.param(INT8, id="int8"),
]
every_kind = pytest.mark.parametrize("kind", ALL)
IDS = torch.tensor([[52, 53, 54, 65, 60, 61]])
WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""Sizes whose layers can have 4 bits."""
MEANS = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
"""NF4's values (Dettmers et al. 2023, appendix E)."""


def quantized(kind: QuantizationSettings, **changes: object) -> nn.Module:
    model = tiny_model(0, **WIDE, **changes)
    quantize_layers(model, kind)
    return model


def adapted(kind: QuantizationSettings, **changes: object) -> nn.Module:
    """A quantised model with adapters that are not zero."""
    model = quantized(kind, **changes)
    torch.manual_seed(1)
    model = apply_lora(model, LoraSettings(rank=2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def digest(model: nn.Module) -> str:
    """Of all that is frozen, with the scales of quantised weights."""
    found = sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if "lora_" not in name:
            found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def nearest(values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return grid[(values[..., None] - grid).abs().argmin(-1)]


@NEEDED
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 9),
    blocks=st.integers(1, 4),
    seed=st.integers(0, 999),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    bias=st.booleans(),
)
def test_nf4_stores_the_nearest_of_its_values_in_each_block(rows: int, blocks: int, seed: int, scale: float, bias: bool) -> None:
    torch.manual_seed(seed)
    block = nn.Sequential(nn.Linear(64 * blocks, rows, bias=bias))
    block[0].weight.data *= scale
    weight = block[0].weight.detach().clone()
    quantize_layers(block, QuantizationSettings("nf4"))
    grid = torch.tensor(MEANS)
    expected = torch.stack([part.abs().max() * nearest(part / part.abs().max(), grid) for part in weight.reshape(-1, 64)])
    found = dequantize_weight(block[0]).reshape(-1, 64)
    limits = (grid[1:] + grid[:-1]) / 2  # at a limit either neighbour is right
    unsure = ((weight.reshape(-1, 64) / weight.reshape(-1, 64).abs().amax(1, keepdim=True))[..., None] - limits).abs().amin(
        -1
    ) < 1e-5
    torch.testing.assert_close(found[~unsure], expected[~unsure], rtol=1e-5, atol=0)


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 9), width=st.integers(1, 70), seed=st.integers(0, 999), is_zero=st.booleans())
def test_int8_is_within_half_a_step_of_each_row(rows: int, width: int, seed: int, is_zero: bool) -> None:
    torch.manual_seed(seed)
    block = nn.Sequential(nn.Linear(width, rows))
    if is_zero:
        block[0].weight.data[0] = 0.0
    weight = block[0].weight.detach().clone()
    quantize_layers(block, INT8)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((dequantize_weight(block[0]) - weight).abs() <= step * 0.5001).all())


def test_int8_by_hand() -> None:
    """The largest of the row is 2.54, a step 2.54 / 127 = 0.02: 0.031 is 1.55 steps, so 2; -1.27 is
    63.5 steps, and the even neighbour is 64."""
    block = nn.Sequential(nn.Linear(3, 1, bias=False))
    block[0].weight.data = torch.tensor([[2.54, 0.031, -1.27]], dtype=torch.float64).float()
    quantize_layers(block, INT8)
    assert block[0].weight.tolist()[0][:2] == [127, 2]
    assert block[0].weight.tolist()[0][2] in (-63, -64)  # 63.5 up to rounding of 2.54 in float32
    torch.testing.assert_close(block[0].scales, torch.tensor([0.02]))


@every_kind
def test_the_gradient_is_that_through_the_dequantised_weights(kind: QuantizationSettings) -> None:
    model = adapted(kind)
    plain = copy_of_dequantised(model)
    outputs = [each(input_ids=IDS).logits for each in (model, plain)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    weights = torch.linspace(-1, 1, outputs[0].numel()).reshape(outputs[0].shape)
    for output in outputs:
        (output.sin() * weights).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    assert len(found) == 28  # 2 blocks x 7 layers x (A, B)
    for name, gradient in found.items():
        assert gradient is not None
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def copy_of_dequantised(model: nn.Module) -> nn.Module:
    """The same adapters over linear layers with the dequantised weights."""
    plain = copy.deepcopy(model)
    for name, layer in find_quantized_layers(model).items():
        place, _, leaf = name.rpartition(".")
        whole = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        whole.weight = nn.Parameter(dequantize_weight(layer), requires_grad=False)
        whole.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        setattr(plain.get_submodule(place), leaf, whole)
    return plain


@every_kind
def test_evaluation_and_training_compute_the_same(kind: QuantizationSettings) -> None:
    model = adapted(kind)
    with torch.no_grad():
        before = model.eval()(input_ids=IDS).logits
    whole = model.train()(input_ids=IDS).logits
    torch.testing.assert_close(before, whole.detach())
    whole.sum().backward()  # also after an evaluation, which repacks weights in some builds of bitsandbytes
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters() if p.requires_grad)


@every_kind
def test_training_changes_the_adapters_alone(kind: QuantizationSettings) -> None:
    model = adapted(kind)
    before, adapters = digest(model), {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    source = ListSource(sorting_items(8, seed=3))
    trainer = Trainer(model=model, algo=make_grpo(group_size=4), batch_source=source, cfg=cpu_config(lr=0.01))
    trainer.train_sync(2)
    assert digest(model) == before == digest(adapted(kind))  # which is what a resumed run makes
    assert any(not torch.equal(p, adapters[n]) for n, p in model.named_parameters() if p.requires_grad)


@every_kind
def test_what_is_published_saved_and_sampled_is_the_model_that_is_trained(kind: QuantizationSettings, tmp_path: Path) -> None:
    model = adapted(kind)
    with torch.no_grad():
        expected = model.eval()(input_ids=IDS).logits
    whole = tiny_model(1, **WIDE)
    published = published_weights(model)
    assert set(published) == {name for name, _ in whole.named_parameters()}
    likes = list_merged(model, dict(model.named_parameters()))
    assert all((like.shape, like.dtype) == (published[name].shape, published[name].dtype) for name, (like, _) in likes.items())
    whole.load_state_dict(published, strict=False)
    save_merged(model, tmp_path / "merged")
    sampled = copy_for_sampling(model, None, None)
    for each in (whole, load_model(str(tmp_path / "merged"), "float32"), sampled):
        assert not find_quantized_layers(each)
        torch.testing.assert_close(each.eval()(input_ids=IDS).logits.detach(), expected, rtol=1e-4, atol=1e-5)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


@every_kind
def test_saved_adapters_are_plain_ones(kind: QuantizationSettings, tmp_path: Path) -> None:
    model = adapted(kind)
    save_adapter(model, tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert len(stored) == 28
    assert all(".lora_" in name and tensor.dtype == torch.float32 for name, tensor in stored.items())
    again = load_adapter(quantized(kind), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits, rtol=0, atol=0)


@cache
def of_100_million() -> nn.Module:
    """The linear layers of four blocks of width 2048, about 100 million weights, in bfloat16."""
    wide = {"q": 2048, "k": 512, "v": 512, "o": 2048, "up": 2816, "gate": 2816}
    torch.manual_seed(0)
    blocks = [nn.ModuleDict({name: nn.Linear(2048, rows, bias=False) for name, rows in wide.items()}) for _ in range(4)]
    return nn.ModuleList(blocks).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "bytes_per_weight"),
    [  # nf4: half a byte, and 4 bytes for 64 weights: .5 + 4/64. double: .5 + 1/64 + 4/(64*256)
        pytest.param(QuantizationSettings("nf4"), 0.5625, marks=NEEDED),
        pytest.param(QuantizationSettings("nf4", double=True), 0.515869140625, marks=NEEDED),
        (INT8, 1 + 4 / 2048),  # a scale for each row
    ],
)
def test_the_memory_of_the_weights(kind: QuantizationSettings, bytes_per_weight: float) -> None:
    model = copy.deepcopy(of_100_million())
    weights = sum(p.numel() for p in model.parameters())
    assert quantize_layers(model, kind) == weights
    layers = find_quantized_layers(model).values()
    held = sum(tensor.nbytes for tensor in model.state_dict().values() if tensor.numel() > 1024 and tensor.numel() != 16)
    assert held / weights == pytest.approx(bytes_per_weight, rel=0.002)
    assert sum(kind.count_bytes(layer.in_features * layer.out_features, layer.out_features) for layer in layers) == pytest.approx(
        held, rel=0.002
    )
    assert count_weights(model, trained=False) == weights


def test_heads_embeddings_and_tied_weights_are_not_quantised() -> None:
    model = quantized(INT8)
    assert len(find_quantized_layers(model)) == 14
    assert type(model.get_output_embeddings()) is nn.Linear
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    layer = nn.Linear(64, 64, bias=False)
    tied = nn.ModuleList([layer, nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)])
    tied[1].weight = layer.weight
    assert quantize_layers(tied, INT8) == 64 * 64


@NEEDED
def test_layers_that_bitsandbytes_would_read_wrongly_keep_their_weights() -> None:
    """Its kernel for CPUs begins a block at each row."""
    layers = nn.ModuleList([nn.Linear(96, 64), nn.Linear(128, 3)])
    assert quantize_layers(layers, QuantizationSettings("nf4")) == 384
    assert type(layers[0]) is nn.Linear
    with pytest.raises(ConfigError, match="input of a multiple of 64"):
        quantize_layers(nn.ModuleList([nn.Linear(96, 64)]), QuantizationSettings("nf4"))


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_compute_dtype_changes_no_dtype_outside_of_the_layer(kind: QuantizationSettings, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(64, 8))
    exact, x = copy.deepcopy(whole), torch.randn(3, 64)
    quantize_layers(whole, QuantizationSettings(kind.kind, kind.double, dtype))
    quantize_layers(exact, kind)
    assert whole(x).dtype == torch.float32
    assert describe_weight(whole[0]).dtype == torch.float32
    torch.testing.assert_close(whole(x), exact(x), rtol=0.05, atol=0.05)


def test_what_cannot_be_done_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must be one of nf4, fp4, int8"):
        QuantizationSettings("int4")
    with pytest.raises(ConfigError, match="double is for nf4 and fp4"):
        QuantizationSettings("int8", double=True)
    source = ListSource(sorting_items(8, seed=3))
    with pytest.raises(ConfigError, match=r"quantised weights are not trained; add lora\.rank=16"):
        Trainer(model=quantized(INT8), algo=make_grpo(group_size=4), batch_source=source, cfg=cpu_config())
    with pytest.raises(ConfigError, match="before apply_lora adds them"):
        quantize_layers(adapted(INT8), INT8)
    with pytest.raises(ConfigError, match="no linear layers in its blocks"):
        quantize_layers(nn.Embedding(4, 4), INT8)
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ludic-rl\[qlora\]'"):
        quantized(QuantizationSettings("nf4"))


def test_the_share_of_trained_weights_counts_packed_ones() -> None:
    model = adapted(INT8)
    whole = sum(p.numel() for p in tiny_model(0, **WIDE).parameters())
    assert count_weights(model, trained=False) == whole
    assert f"{whole:,} are frozen, " in describe_trained_share(model)


@NEEDED
def test_importing_adapters_prints_nothing(caplog: pytest.LogCaptureFixture) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "from ludic.models.adapters import require_peft; require_peft()"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stdout + done.stderr == ""
    assert logging.getLogger("bitsandbytes.backends.cpu.ops").level != logging.ERROR
