"""Models without weights: all modules and buffers, and parameters on the device `meta`, which need
no memory. Ranks that get their weights from others begin with one."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ludic.models.loading import check_dtype, locate_model
from ludic.models.places import find_adapter_base, holds_only_adapters

M = TypeVar("M", bound=nn.Module)


def make_skeleton(model: M) -> M:
    """A copy of the model without its weights. Its buffers are copies, ties stay ties."""
    memo: dict[int, Any] = {id(parameter): _make_empty(parameter) for parameter in model.parameters()}
    return copy.deepcopy(model, memo)  # which takes the parameters from the memo


def drop_weights(model: M) -> M:
    """Free the weights of the model, in place. Returns `model`."""
    empty = {id(parameter): _make_empty(parameter) for parameter in model.parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = empty[id(parameter)]
    return model


def _make_empty(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)


def load_skeleton(source: str, dtype: str, model_class: Any = None, **options: Any) -> Any:
    """The model that `load_model` loads, without its weights: only its config is read. Stored
    buffers have the values that the model begins with, not the values of the files.

    model_class: a class of transformers with `from_config`. None means the class of causal language
    models. options: fields of the config, such as `num_labels`.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    check_dtype(dtype)
    place = locate_model(source)
    if holds_only_adapters(place):  # their model is merged
        return load_skeleton(find_adapter_base(Path(place)), dtype, model_class, **options)
    config = AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
    chosen = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with init_empty_weights(include_buffers=False):
        model = (model_class or AutoModelForCausalLM).from_config(config, dtype=chosen, trust_remote_code=False)
    # `from_pretrained` keeps some tensors in float32, which the class names by patterns, such as
    # `e_score_correction_bias`.
    strict, half = set(model._keep_in_fp32_modules_strict or ()), set(model._keep_in_fp32_modules or ())
    kept = {torch.bfloat16: strict, torch.float16: strict | half}.get(chosen, set())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and any(re.search(part.replace("*", ".*"), name) for part in kept):
            tensor.data = tensor.data.float()
    model.tie_weights()
    return model.eval()  # as from_pretrained leaves it
