"""Models sharded by FSDP2. Only this module and `shard_transfer` depend on how such models and
their tensors look.

`fully_shard` gives a module the methods of `FSDPModule` and makes its parameters DTensors. Every
function here that moves tensors between ranks is a collective: all ranks call it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ludic.errors import ConfigError
from ludic.models.images.features import WHOLE_ENCODER, find_tower_owner
from ludic.models.quantization import find_quantized_layers
from ludic.models.regions import Region, find_region
from ludic.models.wrappers import has_adapters

logger = logging.getLogger(__name__)

Kind = Literal["full", "hybrid"]


@dataclass(frozen=True)
class ShardingSettings:
    """How a model is shared out over ranks.

    >>> settings = ShardingSettings("full", param_dtype=torch.bfloat16)
    >>> model = shard_model(model, settings, make_mesh(settings, "cuda"))
    """

    kind: Kind = "full"
    """`full`: each rank has one part of every weight. `hybrid`: each group of `shards` ranks has a
    copy of the model, shared out over its ranks."""
    shards: int | None = None
    """Ranks that share one copy of a hybrid model. None means the ranks of one machine."""
    param_dtype: torch.dtype | None = None
    """dtype of forward and backward passes, over weights that are stored and stepped in float32.
    None means the dtype of the weights."""
    reduce_dtype: torch.dtype = torch.float32
    """dtype in which gradients are summed over ranks."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer in the memory of the CPU. Needs CUDA devices."""
    activation_checkpointing: bool = False
    """Recompute the activations of each block in the backward pass."""
    reshard_after_forward: bool = True
    """Give up the whole weights of a block after its forward pass, and gather them again for the
    backward pass. False: keep them in between, which costs memory and saves a gathering."""
    block_parameters: int | None = None
    """For a model that names no blocks: modules of at least this many parameters are blocks. None
    means that the model is one."""

    def __post_init__(self) -> None:
        if self.kind not in ("full", "hybrid"):
            raise ConfigError(f"kind ({self.kind}) must be full or hybrid; for a whole model, leave shard_model out")
        if self.shards is not None and (self.kind != "hybrid" or self.shards < 1):
            raise ConfigError(f"shards ({self.shards}) must be >= 1 and is for kind='hybrid', which is {self.kind!r}")
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype not in (None, torch.float32, torch.bfloat16):
                raise ConfigError(f"{name} ({dtype}) must be float32 or bfloat16; for float16, load the model in it")


def make_mesh(settings: ShardingSettings, device: torch.device | str) -> DeviceMesh:
    """The mesh of all ranks: [world] for `full`, [copies, shards] for `hybrid`. Raises ConfigError
    for settings that this process group or device does not allow."""
    kind = torch.device(device).type
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"a sharded model (kind={settings.kind!r}) needs a process group: call ludic.training.ranks.start() under torchrun"
        )
    if settings.cpu_offload and kind != "cuda":
        raise ConfigError(f"cpu_offload moves weights out of GPUs, and the device is {device}; leave it off")
    if settings.cpu_offload and "cpu" not in dist.get_backend_config():
        raise ConfigError(
            f'cpu_offload needs a CPU backend besides {dist.get_backend()}; call init_process_group("cpu:gloo,cuda:nccl")'
        )
    world = dist.get_world_size()
    if settings.kind == "full":
        return init_device_mesh(kind, (world,), mesh_dim_names=("shards",))
    shards = settings.shards or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % shards:
        raise ConfigError(f"shards ({shards}) must divide the number of ranks ({world})")
    return init_device_mesh(kind, (world // shards, shards), mesh_dim_names=("copies", "shards"))


def shard_model(model: nn.Module, settings: ShardingSettings, mesh: DeviceMesh) -> nn.Module:
    """Shard each block of the model (transformers' `_no_split_modules`) and then the rest, in
    place. Returns `model`. Call it after `apply_lora` and before the optimizer is made.

    With `param_dtype`, all weights become float32. Raises ConfigError for a model that is sharded
    already, that has quantised weights, or whose trained weights have several dtypes.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    if is_sharded(model):
        raise ConfigError(f"{type(model).__name__} is sharded already; call shard_model once, on the whole model")
    if find_quantized_layers(model):
        raise ConfigError(f"{type(model).__name__} has quantised weights, which are not sharded; train it without quantization")
    if settings.param_dtype is not None:
        model.float()
    dtypes = sorted({str(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad})
    if len(dtypes) > 1:
        raise ConfigError(f"FSDP shards one dtype, but weights have {', '.join(dtypes)}; set param_dtype=torch.bfloat16")
    if settings.activation_checkpointing:
        enable_checkpointing(model)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=settings.param_dtype, reduce_dtype=settings.reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy(),
    }
    if not settings.reshard_after_forward:
        options["reshard_after_forward"] = False
    blocks = find_blocks(model)
    if not blocks and settings.block_parameters is not None:
        blocks = find_large_modules(model, settings.block_parameters)
    if not blocks:
        logger.warning("%s names no blocks (_no_split_modules); each rank gathers all of it in a pass", type(model).__name__)
    for block in reversed(blocks):  # a block within a block first
        fully_shard(block, **options)
    fully_shard(model, **options)
    owner: Any = find_tower_owner(model)
    if hasattr(owner, "get_image_features"):  # it is called outside of the model's forward pass, and needs whole weights there
        setattr(model, WHOLE_ENCODER, owner.get_image_features)
        register_fsdp_forward_method(model, WHOLE_ENCODER)
        object.__setattr__(owner, WHOLE_ENCODER, getattr(model, WHOLE_ENCODER))
    return model


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the classes that transformers names in `_no_split_modules`, outer ones
    first. Empty for a model that names none."""
    base: Any = model
    if has_adapters(model):
        base = base.get_base_model()
    names = set(getattr(base, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names and module is not model]


def find_large_modules(model: nn.Module, least: int) -> list[nn.Module]:
    """Modules inside `model` of at least `least` parameters that are in no smaller one of them,
    outer ones first. A list of modules is no module of its own.

    Example, `least=10`: of a block with layers of 12, 6 and 5 parameters, the layer of 12 and,
    since 6 + 5 are left, the block.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Collect below; return the number of parameters that are in no collected module."""
        left = sum(parameter.numel() for parameter in module.parameters(recurse=False)) + sum(map(visit, module.children()))
        if left < least or module is model or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return left
        found.append(module)
        return 0

    visit(model)
    return found[::-1]


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to `model`. It must then not be moved to another device."""
    return hasattr(model, "set_requires_gradient_sync")


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward pass of a sharded model exchanges gradients between ranks."""
    sharded: Any = model
    sharded.set_requires_gradient_sync(enabled)


def reshard(model: nn.Module) -> None:
    """Give up the whole weights that a forward pass without gradient gathered, so that each
    parameter is a shard again. Does nothing to a model that is not sharded."""
    modules: list[Any] = [module for module in model.modules() if is_sharded(module)]
    for module in modules:
        module.reshard()


def unshard(model: nn.Module, module: nn.Module) -> None:
    """Make the weights of `module` in `model` whole on this rank, until the next backward pass or
    `reshard`. Does nothing where they are whole."""
    place = next((name for name, each in model.named_modules() if each is module), "")
    owner: Any = None
    for name, each in model.named_modules():  # outer modules first
        if is_sharded(each) and (not name or f"{place}.".startswith(f"{name}.")):
            owner = each
    if owner is not None:
        owner.unshard()


def gather_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def get_local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, which shares its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def find_own_region(tensor: Tensor) -> Region:
    """The region of the whole tensor that this rank has."""
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of the mesh has no part"
    return find_region(tensor.shape, tensor.device_mesh.shape, find_cuts(tensor), coordinate)


def find_cuts(tensor: DTensor) -> tuple[int | None, ...]:
    """For each dimension of the mesh, the dimension of the tensor that it cuts; None for copies."""
    cuts = []
    for placement in tensor.placements:
        if type(placement) is not Shard and not placement.is_replicate():
            raise ConfigError(f"a tensor is placed as {placement}; only shards and copies of FSDP2 can be saved and published")
        cuts.append(placement.dim if isinstance(placement, Shard) else None)
    return tuple(cuts)


def make_shard(local: Tensor, like: Tensor) -> Tensor:
    """The sharded tensor of which this rank has `local`, shared out as `like`."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local.to(like.to_local().device),
        like.device_mesh,
        like.placements,
        shape=like.shape,
        stride=like.stride(),
        run_check=False,
    )


def enable_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass instead of storing them."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # newer and older transformers
    enable = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if enable is None:
        raise ConfigError(f"{type(model).__name__} has no {names[0]}; leave gradient checkpointing off")
    enable()
    if hasattr(model, "config"):
        model.config.use_cache = False
    if hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
