"""Stored buffers of a sharded model, of which only rank 0 has the values of the files."""

from pathlib import Path

import torch.distributed as dist
from forked_ranks import run_ranks
from safetensors.torch import load_file
from small_models import mixture_model

from ludic.models.sharded_files import write_sharded
from ludic.models.sharded_loading import copy_home, shard_copy
from ludic.models.sharding import ShardingSettings, make_mesh
from ludic.training import ranks


def move_buffers(rank, world, folder):
    """Stored buffers of which only rank 0 has the values: sent to all, changed apart, written and
    brought home."""
    whole = mixture_model("DeepseekV3")
    settings = ShardingSettings("full")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    if rank > 0:
        whole.get_buffer(name).zero_()
    trained = shard_copy(whole, settings, make_mesh(settings, "cpu"), agree=ranks.agree)
    sent = trained.get_buffer(name).tolist()
    trained.get_buffer(name).fill_(rank + 1)
    write_sharded(trained, None, Path(folder), agree=ranks.agree)
    copy_home(trained, whole, agree=ranks.agree)
    dist.barrier()
    files = sorted(Path(folder).glob("*.safetensors"))
    stored = [tensors[name].tolist() for tensors in map(load_file, files) if name in tensors]
    return {"sent": sent, "stored": stored, "home": whole.get_buffer(name).tolist(), "files": len(files)}


def find_buffers(runs):
    (runs.folder / "buffers").mkdir()
    return run_ranks(2, move_buffers, str(runs.folder / "buffers"))
