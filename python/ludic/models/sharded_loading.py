"""Starts sharded models: made empty, sharded, then filled. `load_sharded` reads the slices of each
rank from files, so that no rank holds all of it; `shard_copy` sends them from rank 0's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ludic.errors import ConfigError
from ludic.models.loading import locate_model
from ludic.models.places import holds_only_adapters
from ludic.models.shard_transfer import Agree, SharedTensor, send_copies, send_to_owners, send_to_shards
from ludic.models.sharding import ShardingSettings, reshard, shard_model
from ludic.models.skeleton import load_skeleton, make_skeleton
from ludic.models.state_files import read_model
from ludic.models.wrappers import has_adapters


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
        raise ConfigError(
            f"model ({source}) is no folder with the weights of a model, of which each rank could read its slices; download it, or "
            "merge the adapters, or call shard_copy on load_model(...)"
        )
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
