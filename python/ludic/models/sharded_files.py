"""Writes a sharded model and its optimizer: every rank its own files, none the whole.

    config.json                            rank 0
    model-00001-of-00002.safetensors ..    each tensor whole, on the rank that owns the file;
                                           buffers are rank 0's
    model.safetensors.index.json           which file has which tensor: Hugging Face's layout
    optimizer-00001-of-00002.safetensors   the parts of the optimizer's state that rank 0 has
    optimizer.json                         its other values, its parameter groups, and its files

With `as_held` the weights are written like the optimizer's state, and nothing is sent:

    weights-00001-of-00002.safetensors     the parts of the weights that rank 0 has
    model.shards.json                      the files with weights

`state_files.read_model` and `read_optimizer` read them on any number of ranks, each its own parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ludic.errors import ConfigError
from ludic.files.atomic import write_json
from ludic.files.checkpoints import INDEX, MODEL, SHARDS
from ludic.models.regions import assign_owners
from ludic.models.shard_transfer import Agree, SharedTensor, send_to_owners
from ludic.models.sharding import find_cuts, find_own_region, get_local, reshard
from ludic.models.state_files import describe_optimizer, make_adapter_options, map_adapter_names
from ludic.models.tensor_files import OFFSETS, TensorFileWriter
from ludic.models.wrappers import has_adapters, unwrap_model


def name_of_rank(kind: str, rank: int, files: int) -> str:
    """Example: the file of rank 0 of 2 is `model-00001-of-00002.safetensors`."""
    return f"{kind}-{rank + 1:05d}-of-{files:05d}.safetensors"


def write_sharded(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path, *, agree: Agree, as_held: bool = False
) -> None:
    """Write this rank's files into the folder, which all ranks see. All ranks call it; `agree` is
    the function of `shard_transfer`. Raises on all ranks if it fails on one while weights are
    moved. `as_held`: each rank writes the parts of the weights that it has. Adapters are always
    whole."""
    inner = unwrap_model(model)
    reshard(inner)
    if has_adapters(inner):
        _write_adapters(inner, folder, agree=agree)
    elif as_held:
        stored = {name: (number, tensor) for number, (name, tensor) in enumerate(_list_stored(inner).items())}
        files = _write_parts("weights", stored, folder)
        if dist.get_rank() == 0:
            _write_config(inner, folder)
            write_json(folder / SHARDS, {"shards": files})
    else:
        _write_model(inner, folder, agree=agree)
    if optimizer is not None:
        state = optimizer.state_dict()
        tensors = {
            f"{number}/{name}": (int(number), value)
            for number, entries in state["state"].items()
            for name, value in entries.items()
            if isinstance(value, Tensor)
        }
        shards = _write_parts("optimizer", tensors, folder)
        if dist.get_rank() == 0:
            write_json(folder / "optimizer.json", {**describe_optimizer(optimizer, state), "shards": shards})


def _write_model(model: Any, folder: Path, *, agree: Agree) -> None:
    rank = dist.get_rank()
    stored = _list_stored(model)
    tensors = {name: SharedTensor.of(tensor) for name, tensor in stored.items()}
    sizes = {name: tensor.size for name, tensor in tensors.items()}
    shared = {name: size for name, size in sizes.items() if isinstance(stored[name], DTensor)}
    files = max(1, min(dist.get_world_size(), len(shared)))
    owners = dict.fromkeys(sizes, 0) | assign_owners(shared, files)
    own = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
        if owners[name] == rank
    }
    file_of = {owner: MODEL if files == 1 else name_of_rank("model", owner, files) for owner in range(files)}
    with ExitStack() as stack:
        with agree("opening a file for weights"):
            file = stack.enter_context(TensorFileWriter(folder / file_of[rank], own)) if own else None
        send_to_owners(tensors, owners, lambda name, tensor: _write(file, name, tensor), agree=agree)
    if rank == 0:
        _write_config(model, folder)
        places = {name: file_of[owner] for name, owner in sorted(owners.items())}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places})


def _write(file: TensorFileWriter | None, name: str, tensor: Tensor) -> None:
    assert file is not None, "only an owner receives tensors"
    file.write(name, tensor)


def _list_stored(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and saved buffers by name, tied ones once, under their first name."""
    state = model.state_dict()
    first = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first.keys()
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {name: tensor for name, tensor in state.items() if name not in tied | ignored}


def _write_config(model: Any, folder: Path) -> None:
    """What `save_pretrained` writes in addition to weights. FSDP gives the class another name."""
    kind = type(model).__name__.removeprefix("FSDP")
    if not hasattr(model, "save_pretrained"):
        write_json(folder / "config.json", {"model_class": kind})
        return
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [kind]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _write_adapters(model: Any, folder: Path, *, agree: Agree) -> None:
    """Rank 0 gathers the adapters, which are small, and writes them as PEFT does."""
    state = model.state_dict()
    tensors = {name: SharedTensor.of(state[name]) for name in map_adapter_names(model).values()}
    gathered: dict[str, Tensor] = {}
    send_to_owners(tensors, dict.fromkeys(tensors, 0), lambda name, tensor: gathered.update({name: tensor.cpu()}), agree=agree)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=gathered, **make_adapter_options(model))


def _write_parts(kind: str, tensors: Mapping[str, tuple[int, Tensor]], folder: Path) -> list[str]:
    """Write the parts that this rank has. Returns the names of the files of all ranks. `tensors`:
    name -> (number, by which `_writes` chooses among copies, tensor)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = {name: tensor for name, (number, tensor) in tensors.items() if _writes(tensor, number)}
    offsets = {name: [start for start, _ in find_own_region(value)] for name, value in own.items() if isinstance(value, DTensor)}
    parts = {name: get_local(value) for name, value in own.items()}
    path = folder / name_of_rank(kind, rank, world)
    with TensorFileWriter(path, parts, metadata={OFFSETS: json.dumps(offsets)}) as file:
        for name, part in parts.items():
            file.write(name, part)
    return [name_of_rank(kind, each, world) for each in range(world)]


def _writes(value: Tensor, number: int) -> bool:
    """Whether this rank writes its part of a tensor of the parameter `number`. Of several copies of
    a hybrid model, one is written; the parameters 0, 1, 2, .. take the copies in turn."""
    if not isinstance(value, DTensor):
        return dist.get_rank() == 0
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    copies = [
        (place, size)
        for place, size, cut in zip(coordinate, value.device_mesh.shape, find_cuts(value), strict=True)
        if cut is None
    ]
    return value.to_local().numel() > 0 and all(place == number % size for place, size in copies)


def check_all_have_a_folder(folder: Path | None) -> Path:
    """`folder`. Raises ConfigError without one."""
    if folder is None:
        raise ConfigError("every rank writes a part of a sharded model; give all the same folder, on a shared file system")
    return folder
