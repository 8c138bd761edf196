"""Weights of frozen linear layers in 4 or 8 bits, under adapters that are trained: QLoRA (Dettmers
et al. 2023, QLoRA, section 3).

    nf4, fp4   blocks of 64 weights: a code of 4 bits each, and their largest size in float32; with
               `double` that in 8 bits, in blocks of 256 (section 3, Double Quantization)
    int8       rows: w ~ code * max|row| / 127, with codes from -127 to 127

A layer computes with the dequantised weights, in training and in sampling, and keeps none of them.
Codes of 4 bits are the ones of bitsandbytes. For int8 only weights are quantised, unlike in
LLM.int8(), so that the trainer and a sampler compute the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError, import_optional
from ludic.models.heads import find_head_parts
from ludic.models.images.features import find_image_modules

KINDS = ("nf4", "fp4", "int8")
BLOCK = 64
"""Weights of 4 bits that share a scale."""
BLOCK_OF_SCALES = 256
"""Scales of 8 bits that share one, with `double`."""


@dataclass(frozen=True)
class QuantizationSettings:
    """How frozen weights are stored.

    >>> quantize_layers(model, QuantizationSettings("nf4"))
    >>> model = apply_lora(model, LoraSettings(rank=16))
    """

    kind: str
    """nf4, fp4 or int8."""
    double: bool = False
    """Store the scales of nf4 and fp4 in 8 bits too."""
    compute_dtype: torch.dtype | None = None
    """What weights are dequantised to for a product. None means the type that they had."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"quantization ({self.kind}) must be one of {', '.join(KINDS)}; leave it out to quantise nothing")
        if self.double and self.kind == "int8":
            raise ConfigError("quantization.double is for nf4 and fp4, whose blocks have scales; int8 has one for each row")

    def count_bytes(self, weights: int, rows: int) -> int:
        """Bytes of a layer with this number of weights and rows. Example: nf4, 4096 weights: 2048
        of codes and 64 scales of 4 bytes, 2304 in all, 0.5625 a weight."""
        if self.kind == "int8":
            return weights + 4 * rows
        blocks = -(-weights // BLOCK)
        scales = blocks + 4 * -(-blocks // BLOCK_OF_SCALES) if self.double else 4 * blocks
        return -(-weights // 2) + scales


class _Int8Product(torch.autograd.Function):
    """x [..., in] times dequantised weights [out, in], of which only the codes are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return x @ _dequantize_rows(codes, scales, x.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        codes, scales = ctx.saved_tensors
        return gradients[0] @ _dequantize_rows(codes, scales, gradients[0].dtype), None, None


class Int8Linear(nn.Linear):
    """A frozen linear layer with weights of 8 bits [out, in] and a float32 scale for each row."""

    scales: Tensor

    def __init__(self, layer: nn.Linear, weight: Tensor, compute_dtype: torch.dtype) -> None:
        """`weight` of `layer`, on its final device."""
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        largest = weight.abs().amax(dim=1).float()
        codes = (weight.float() * (127.0 / largest.clamp_min(torch.finfo(torch.float32).tiny))[:, None]).round_()
        self.weight = nn.Parameter(codes.to(torch.int8), requires_grad=False)
        self.register_buffer("scales", largest / 127.0)
        self.register_parameter("bias", _frozen_bias(layer, weight.device, compute_dtype))
        self.compute_dtype, self.stored_dtype = compute_dtype, weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _Int8Product.apply(x.to(self.compute_dtype), self.weight, self.scales)
        return (product if self.bias is None else product + self.bias).to(x.dtype)


def _dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scales.float()[:, None]).to(dtype)


def _frozen_bias(layer: nn.Linear, device: torch.device, dtype: torch.dtype) -> nn.Parameter | None:
    return None if layer.bias is None else nn.Parameter(layer.bias.detach().to(device, dtype), requires_grad=False)


@contextmanager
def quiet_kernels() -> Iterator[None]:
    """Suppress the advice to install kernels that bitsandbytes logs when it is imported, which PEFT
    does wherever it finds it."""
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def require_bitsandbytes() -> Any:
    """The module `bitsandbytes`. Raises MissingExtraError if it is not installed."""
    with quiet_kernels():
        return import_optional("bitsandbytes", "qlora")


def find_quantizable_layers(model: Any, settings: QuantizationSettings) -> dict[str, nn.Linear]:
    """The linear layers of the model's blocks, by name. A tower for images, the output layer, the
    head of a model that scores, embeddings and tied weights stay as they are; and in 4 bits layers
    whose input is no multiple of 64, which bitsandbytes 0.50 dequantises wrongly on a CPU."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    heads = tuple(f"{head}." for head in find_head_parts(model))
    of_images, uses = find_image_modules(model), dict[int, int]()
    for module in model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and (settings.kind == "int8" or module.in_features % BLOCK == 0)
        and module is not output
        and any(part.isdigit() for part in name.split("."))  # in a block
        and name not in of_images
        and not f"{name}.".startswith(heads)
        and uses[id(module.weight)] == 1
    }


@torch.no_grad()
def quantize_layers(model: nn.Module, settings: QuantizationSettings, *, device: torch.device | str | None = None) -> int:
    """Quantise the linear layers of the model's blocks in place, one after another; returns how
    many weights. Call it before `apply_lora`.

    device: where they are quantised and stay, so that a GPU never has the whole model in full
    precision. None means where they are.

    Raises ConfigError for a model with adapters and for one without such layers, MissingExtraError
    for 4 bits without bitsandbytes.
    """
    if hasattr(model, "peft_config"):
        raise ConfigError(f"{type(model).__name__} has adapters; quantise its weights before apply_lora adds them")
    layers = find_quantizable_layers(model, settings)
    if not layers:
        rule = "" if settings.kind == "int8" else f" with an input of a multiple of {BLOCK}"
        raise ConfigError(f"{type(model).__name__} has no linear layers{rule} in its blocks to quantise; leave quantization out")
    count = 0
    for name, layer in layers.items():
        count += layer.weight.numel()
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, _quantize(layer, settings, device))
    return count


def _quantize(layer: nn.Linear, settings: QuantizationSettings, device: torch.device | str | None) -> nn.Linear:
    weight = layer.weight.detach().to(device).contiguous()
    dtype = settings.compute_dtype or weight.dtype
    if settings.kind == "int8":
        return Int8Linear(layer, weight, dtype)
    bnb = require_bitsandbytes()
    codes, state = bnb.functional.quantize_4bit(
        weight, blocksize=BLOCK, compress_statistics=settings.double, quant_type=settings.kind
    )
    made: nn.Linear = bnb.nn.Linear4bit(
        *(layer.in_features, layer.out_features, layer.bias is not None, dtype),
        compress_statistics=settings.double,
        quant_type=settings.kind,
        device="meta",
    )
    options = {"blocksize": BLOCK, "compress_statistics": settings.double, "quant_type": settings.kind, "module": made}
    made.weight = bnb.nn.Params4bit(codes, requires_grad=False, quant_state=state, bnb_quantized=True, **options)
    made.register_parameter("bias", _frozen_bias(layer, weight.device, dtype))
    made.quant_state = state
    keep_trainable(made)
    return made


def find_quantized_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers with quantised weights by name: from `quantize_layers`, or from a model that
    transformers loaded with a `BitsAndBytesConfig`."""
    found = {}
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("bitsandbytes.")}
        if isinstance(module, Int8Linear) or (isinstance(module, nn.Linear) and kinds & {"Linear4bit", "Linear8bitLt"}):
            found[name] = module
    return found


def count_weights(model: nn.Module, *, trained: bool) -> int:
    """How many weights of the model are trained, or are frozen: also of packed ones, where a byte
    has two."""
    packed = {id(layer.weight): layer.in_features * layer.out_features for layer in find_quantized_layers(model).values()}
    return sum(packed.get(id(p), p.numel()) for p in model.parameters() if p.requires_grad is trained)


def keep_trainable(model: nn.Module) -> None:
    """Have layers of 4 bits compute alike in evaluation and in training. On processors with
    bfloat16 products bitsandbytes repacks weights that are evaluated, and its kernel for them has
    no gradient."""
    layer: Any
    for layer in find_quantized_layers(model).values():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def is_quantization_state(name: str, layers: dict[str, nn.Linear]) -> bool:
    """Whether a name of the state dict is neither of the weight nor of the bias of such a layer:
    its scales and codes."""
    return any(name.startswith(f"{place}.") and name not in (f"{place}.weight", f"{place}.bias") for place in layers)


def describe_weight(layer: nn.Linear) -> Tensor:
    """A tensor on the device `meta` with the shape [out, in] and the dtype of the dequantised
    weights."""
    return torch.empty(layer.out_features, layer.in_features, dtype=_stored_dtype(layer), device="meta")


def _stored_dtype(layer: Any) -> torch.dtype:
    if isinstance(layer, Int8Linear):
        return layer.stored_dtype
    state = getattr(layer.weight, "quant_state", None)
    dtype: torch.dtype = torch.float16 if state is None else state.dtype  # LLM.int8() quantises float16
    return dtype


@torch.no_grad()
def dequantize_weight(layer: Any) -> Tensor:
    """The [out, in] weights that the layer computes with, in the dtype that they had before."""
    if isinstance(layer, Int8Linear):
        return _dequantize_rows(layer.weight, layer.scales, layer.stored_dtype)
    functional, weight = require_bitsandbytes().functional, layer.weight
    whole: Tensor
    if hasattr(layer, "state"):
        held = weight if getattr(weight, "SCB", None) is not None else layer.state
        if held.SCB is not None:
            whole = functional.int8_vectorwise_dequant(held.CB, held.SCB)
            return whole.to(torch.float16)
    elif weight.quant_state is not None:
        if getattr(weight.quant_state, "packing_format_for_cpu", False):
            layer.state_dict()  # which undoes the packing
        whole = functional.dequantize_4bit(weight.data, weight.quant_state)
        return whole
    raise ConfigError(f"the weights of a {type(layer).__name__} are not quantised yet; move the model to its device first")


def replace_quantized(model: nn.Module) -> nn.Module:
    """The model with linear layers that are not quantised in place of those that are. Their weights
    are not set."""
    for name, layer in find_quantized_layers(model).items():
        owner, _, leaf = name.rpartition(".")
        options: dict[str, Any] = {"device": layer.weight.device, "dtype": _stored_dtype(layer)}
        setattr(
            model.get_submodule(owner), leaf, nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, **options)
        )
    return model
