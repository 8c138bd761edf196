"""Starts a sharded model without a rank that holds all of it: made empty, sharded, then filled with
the slices that each rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ludic.errors import ConfigError
from ludic.models.loading import check_dtype, holds_only_adapters, locate_model
from ludic.models.sharding import ShardingSettings, shard_model
from ludic.models.state_files import read_model


def load_sharded(source: str, dtype: str, settings: ShardingSettings, mesh: DeviceMesh) -> Any:
    """A causal language model, sharded as `shard_model` does it. Each rank reads its own slices of
    the files and holds nothing else; all ranks call this.

    source: a folder in Hugging Face layout with safetensors, or the folder of a run.
    dtype: as for `load_model`; with `settings.param_dtype` all weights become float32.

    >>> mesh = make_mesh(settings, "cuda")
    >>> model = load_sharded("/models/qwen", "bfloat16", settings, mesh)

    Raises ConfigError for a hub id and for adapters: load those whole (`load_model`) and call
    `shard_model`.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    check_dtype(dtype)
    place = Path(locate_model(source))
    if not place.is_dir() or holds_only_adapters(str(place)):
        raise ConfigError(
            f"model ({source}) is no folder with the weights of a model, of which each rank could read its slices; download it, or "
            "merge the adapters, or call shard_model on load_model(...)"
        )
    config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=_choose_dtype(dtype, config), trust_remote_code=False)
    return fill_shards(model, place, settings, mesh)


def _choose_dtype(name: str, config: Any) -> torch.dtype:
    chosen: torch.dtype = (config.dtype or torch.float32) if name == "auto" else getattr(torch, name)
    return chosen


def fill_shards(model: nn.Module, folder: Path, settings: ShardingSettings, mesh: DeviceMesh) -> nn.Module:
    """Shard a model whose parameters are on the device `meta`, and read its weights from `folder`.
    Its buffers must have their values, which no file has."""
    transformer: Any = model
    transformer.tie_weights()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    shard_model(model, settings, mesh)
    model.to_empty(device="cpu" if settings.cpu_offload else mesh.device_type)
    transformer.tie_weights()  # to_empty gave each name a tensor of its own
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    read_model(model, folder)
    model.eval()  # as from_pretrained leaves it
    return model
