"""Starts sharded models: made without weights, sharded, then filled.

`make_skeleton` and `load_skeleton` make models with all modules and buffers, and parameters on the
device `meta`, which need no memory. `load_sharded` reads the slices of each rank from files, so
that no rank holds all of it; `shard_copy` sends them from rank 0's model.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ludic.errors import ConfigError
from ludic.models.loading import check_dtype, choose_class, locate_model, with_processor
from ludic.models.places import find_adapter_base, holds_only_adapters
from ludic.models.shard_transfer import Agree, SharedTensor, send_copies, send_to_owners, send_to_shards
from ludic.models.sharding import ShardingSettings, reshard, shard_model
from ludic.models.state_files import read_model
from ludic.models.wrappers import has_adapters

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


def load_skeleton(source: str, dtype: str, *, scores: bool = False, **options: Any) -> Any:
    """The model that `load_model` loads, or with `scores` the one of `load_classifier`, without its
    weights: only its config is read. Stored buffers have the values that the model begins with, not
    the values of the files.

    options: fields of the config, such as `num_labels`.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    check_dtype(dtype)
    place = locate_model(source)
    if holds_only_adapters(place):  # their model is merged
        return load_skeleton(find_adapter_base(Path(place)), dtype, scores=scores, **options)
    config = AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
    chosen = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with init_empty_weights(include_buffers=False):
        model = choose_class(config, scores=scores).from_config(config, dtype=chosen, trust_remote_code=False)
    # `from_pretrained` keeps some tensors in float32, which the class names by patterns, such as
    # `e_score_correction_bias`.
    strict, half = set(model._keep_in_fp32_modules_strict or ()), set(model._keep_in_fp32_modules or ())
    kept = {torch.bfloat16: strict, torch.float16: strict | half}.get(chosen, set())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and any(re.search(part.replace("*", ".*"), name) for part in kept):
            tensor.data = tensor.data.float()
    model.tie_weights()
    return with_processor(model.eval(), place, options)  # in evaluation mode, as from_pretrained leaves it


def load_sharded(source: str, dtype: str, settings: ShardingSettings, mesh: DeviceMesh) -> Any:
    """A causal language model, sharded as `shard_model` does it. Each rank reads its own slices of
    the files and holds nothing else; all ranks call this.

    source: a folder in Hugging Face layout with safetensors, or the folder of a run.
    dtype: as for `load_model`; with `settings.param_dtype` all weights become float32.

    >>> mesh = make_mesh(settings, "cuda")
    >>> model = load_sharded("/models/qwen", "bfloat16", settings, mesh)

    Raises ConfigError for a hub id and for adapters: rank 0 loads those whole (`load_model`), and
    `shard_copy` sends the others their shards.
    """
    place = Path(locate_model(source))
    if not place.is_dir() or holds_only_adapters(str(place)):
        raise ConfigError(f"model ({source}) must be a folder with the weights of a model; download it, or merge its adapters")
    # Buffers that are not stored have their values in the skeleton; no file has them.
    model = shard_skeleton(load_skeleton(str(place), dtype), settings, mesh)
    read_model(model, place)
    return model.eval()  # as from_pretrained leaves it


def shard_copy(whole: nn.Module, settings: ShardingSettings, mesh: DeviceMesh, *, agree: Agree) -> nn.Module:
    """A sharded model with the weights and buffers that `whole` has on rank 0, which keeps it.
    Other ranks need a `make_skeleton` of it, and get their shards from rank 0, a bucket at a time.
    All ranks call this.

    >>> trained = shard_copy(whole, settings, mesh, agree=ranks.agree)
    >>> copy_home(trained, whole, agree=ranks.agree)  # after some training
    """
    model = shard_skeleton(make_skeleton(whole), settings, mesh)
    send_to_shards(dict(model.named_parameters()), dict(whole.named_parameters()), agree=agree)
    send_copies(dict(model.named_buffers()), agree=agree)  # which a skeleton of a config lacks
    return model


@torch.no_grad()
def copy_home(trained: nn.Module, whole: nn.Module, *, agree: Agree) -> None:
    """Copy the trained weights of a sharded model, and rank 0's stored buffers, into `whole` on
    rank 0, a bucket at a time. All ranks call this; `whole` is not touched on other ranks."""
    reshard(trained)
    targets = dict(whole.named_parameters())
    shared = {name: SharedTensor.of(value) for name, value in trained.named_parameters() if value.requires_grad}
    send_to_owners(shared, dict.fromkeys(shared, 0), lambda name, tensor: targets[name].copy_(tensor), agree=agree)
    if dist.get_rank() == 0:
        stored, own = whole.state_dict().keys(), dict(whole.named_buffers())
        for name, buffer in trained.named_buffers():
            if name in stored:
                own[name].copy_(buffer)


def shard_skeleton(model: nn.Module, settings: ShardingSettings, mesh: DeviceMesh) -> nn.Module:
    """Shard a model whose parameters are on the device `meta`, in place. Its shards have memory
    then, and no values; its buffers keep theirs. Returns `model`."""
    _tie(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    shard_model(model, settings, mesh)
    model.to_empty(device="cpu" if settings.cpu_offload else mesh.device_type)
    _tie(model)  # to_empty gave each name a tensor of its own
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model


def _tie(model: Any) -> None:
    """Tie the weights that the model of transformers ties, with or without adapters."""
    (model.get_base_model() if has_adapters(model) else model).tie_weights()
