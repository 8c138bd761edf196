"""Models and optimizers as safetensors and JSON. Pickle is neither written nor read.

Writes models that this process has whole; `sharded_files` writes those that several ranks share.
Reads both into both: a rank reads its own parts of sharded weights and no others.

Mixtures of experts whose files have each expert's matrices and whose model has one tensor of all
of them. A rank reads its own part of that tensor, from the experts that are in it.

    files   experts.0.gate_proj [3, 4], experts.0.up_proj [3, 4], experts.1.gate_proj ..
    model   experts.gate_up_proj [2, 6, 4]   expert 0: its 3 rows of gate, then 3 of up

transformers has the names (`get_checkpoint_conversion_mapping`) and converts whole models by them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ludic.errors import CheckpointError, DataError
from ludic.files.atomic import read_json, write_json
from ludic.files.checkpoints import ADAPTER, INDEX, MODEL, PICKLED, SHARDS
from ludic.models.adapters import require_peft
from ludic.models.regions import Region, intersect, split_in_buckets
from ludic.models.sharding import find_own_region, get_local, is_sharded, make_shard, reshard
from ludic.models.tensor_files import StoredTensors
from ludic.models.wrappers import has_adapters, unwrap_model

logger = logging.getLogger(__name__)

EMBEDDINGS = ("embed_tokens", "lm_head")
"""Layers that share a vocabulary, by PEFT's names."""
MAPPED_BYTES = 64 << 20
"""Bytes of shards that are read before the files are opened again, which frees what was mapped."""


def write_model_and_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path | None) -> None:
    """`write_model`, and if there is an optimizer `write_optimizer` and an index of the weights.
    Without a folder, nothing."""
    if folder is None:
        return
    write_model(model, folder)
    if optimizer is None:
        return
    write_optimizer(optimizer, model, folder)
    # vLLM and SGLang load every `*.safetensors` of a folder without an index, the optimizer's as
    # well. Weights in several files have an index already, and adapters need none.
    if (folder / MODEL).exists():
        with safe_open(folder / MODEL, framework="pt") as file:
            names = sorted(file.keys())
        write_json(folder / INDEX, {"metadata": {}, "weight_map": dict.fromkeys(names, MODEL)})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises CheckpointError, which names the file, for one that
    is truncated or in another format."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def write_model(model: nn.Module, folder: Path) -> None:
    """Write the weights with `save_pretrained`, which writes only the adapters of a model that has
    some. A module without that method becomes model.safetensors, with a config.json that names its
    class."""
    inner: Any = unwrap_model(model)
    state = inner.state_dict()
    if hasattr(inner, "save_pretrained"):
        inner.save_pretrained(folder, state_dict=state, **make_adapter_options(inner))
        return
    seen: set[tuple[Any, ...]] = set()
    distinct = {}  # tied weights are stored once
    for name, tensor in state.items():
        identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if not tensor.numel() or identity not in seen:
            seen.add(identity)
            distinct[name] = tensor.detach().contiguous()
    save_file(distinct, folder / MODEL, metadata={"format": "pt"})
    write_json(folder / "config.json", {"model_class": type(inner).__name__})


def read_model(model: nn.Module, folder: Path) -> None:
    """Copy the weights in the folder into the model. Every name must be present, one for each group
    of tied weights."""
    model = unwrap_model(model)
    if is_sharded(model):
        _read_shards_of_model(model, folder)
        return
    state: dict[str, Any]
    if (folder / ADAPTER).exists():
        stored = read_tensors(folder / ADAPTER)
        places = _map_stored_adapter(model, stored, folder)
        state = {places[name]: tensor for name, tensor in stored.items()}
    else:
        state = dict(_read_stored(folder))
        if not set(state) <= set(model.state_dict()):
            state = _convert_names(model, folder) or state
        _check_names(model, state, folder)
    _check_dtypes(model, state, folder)
    model.load_state_dict(state, strict=False)


def _convert_names(model: nn.Module, folder: Path) -> dict[str, Tensor] | None:
    """The weights in the folder by the model's names. `save_pretrained` writes a mixture of experts
    expert by expert, as it is published, and the model has one tensor for all of them. None if the
    weights belong to another model."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    try:
        loaded, info = type(model).from_pretrained(folder, config=model.config, dtype=model.dtype, **options)
    except (OSError, RuntimeError, ValueError):  # no config.json, other shapes
        return None
    return None if info["missing_keys"] or info["unexpected_keys"] else dict(loaded.state_dict())


@torch.no_grad()
def _read_shards_of_model(model: nn.Module, folder: Path) -> None:
    """Copy this rank's parts of the weights in the folder into a sharded model."""
    reshard(model)
    own = model.state_dict()
    adapted = (folder / ADAPTER).exists()
    files, index = ([ADAPTER], None) if adapted else find_weight_files(folder)
    with _open_by_names_of_model(model, folder, files, index) as stored:
        described = stored.describe()
        if adapted:
            places = _map_stored_adapter(model, described, folder)
        else:
            places = {name: name for name in described}
            _check_names(model, described, folder)
        _check_dtypes(model, {places[name]: like for name, like in described.items()}, folder)
        for name, like in described.items():
            target = own[places[name]]
            if target.shape != like.shape:
                raise CheckpointError(
                    f"{name} in {folder} has shape {tuple(like.shape)}, not {tuple(target.shape)}; use the same config"
                )
    sizes = {name: get_local(own[places[name]]).numel() * like.element_size() for name, like in described.items()}
    for names in split_in_buckets(sizes, MAPPED_BYTES):
        with _open_by_names_of_model(model, folder, files, index) as stored:
            for name in names:
                target = own[places[name]]
                get_local(target).copy_(stored.read(name, find_own_region(target)))


@contextmanager
def _open_by_names_of_model(
    model: nn.Module, folder: Path, files: Iterable[str], places: Mapping[str, str] | None
) -> Iterator[StoredTensors | FusedExperts]:
    """The stored tensors. Experts have the names of the model if they are stored under others."""
    with StoredTensors([folder / name for name in files], places=places) as stored:
        fits = set(stored.names()) <= set(model.state_dict())
        yield stored if fits else find_fused(model, stored) or stored


def _check_dtypes(model: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """Raise CheckpointError if a stored tensor is of integers and the model's of floats, or the
    reverse. Warn once if both are of floats and their precision differs: a copy rounds."""
    own = model.state_dict()
    others = [name for name, tensor in state.items() if name in own and own[name].dtype != tensor.dtype]
    for name in others:
        if own[name].is_floating_point() != state[name].is_floating_point():
            raise CheckpointError(f"{name} in {folder} is {state[name].dtype}, not {own[name].dtype}; use its own model")
    if others:
        stored, wanted = state[others[0]].dtype, own[others[0]].dtype
        logger.warning("%d tensors in %s are converted from %s to the model's %s", len(others), folder, stored, wanted)


def _read_stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all weights in the folder, from the shards of an index or else from the
    single file."""
    files, places = find_weight_files(folder)
    if places is not None:
        for file in files:
            with safe_open(folder / file, framework="pt") as shard:
                stored = set(shard.keys())
                for name in (name for name, place in places.items() if place == file):
                    if name not in stored:
                        raise KeyError(f"{name} is not in {folder / file}, where the index puts it; the checkpoint is damaged")
                    yield name, shard.get_tensor(name)
    elif files == [MODEL]:
        yield from read_tensors(folder / MODEL).items()
    else:
        with StoredTensors([folder / name for name in files]) as parts:
            yield from ((name, parts.read(name)) for name in parts.names())


def _check_names(model: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    own = model.state_dict()
    unknown = sorted(set(state) - set(own))
    held = {get_local(own[name]).data_ptr() for name in state if name in own}
    missing = sorted(name for name in own if name not in state and get_local(own[name]).data_ptr() not in held)
    if missing or unknown:
        raise CheckpointError(
            f"the weights in {folder} do not fit {type(model).__name__}: missing {missing[:4]} ({len(missing)} in all), unknown "
            f"{unknown[:4]} ({len(unknown)} in all); build the model from the same config"
        )


def map_adapter_names(model: nn.Module) -> dict[str, str]:
    """Name in adapter_model.safetensors to name in the model."""
    names: Any = {name: name for name in model.state_dict()}
    return dict(require_peft().get_peft_model_state_dict(model, state_dict=names, **make_adapter_options(model)))


def make_adapter_options(model: Any) -> dict[str, bool]:
    """PEFT's option for storing embeddings with the adapters: True if they are adapted. Without it
    PEFT would query the hub."""
    if not hasattr(model, "get_base_model"):
        return {}
    targets = getattr(model.peft_config.get("default"), "target_modules", None)
    adapted = not isinstance(targets, str) and any(name in (targets or ()) for name in EMBEDDINGS)
    return {"save_embedding_layers": adapted}


def _map_stored_adapter(model: nn.Module, stored: Mapping[str, Tensor], folder: Path) -> dict[str, str]:
    """`map_adapter_names`. Raises CheckpointError for adapters that do not fit the model."""
    if not has_adapters(model):
        raise CheckpointError(f"{folder} holds an adapter, {type(model).__name__} has none; wrap it with the same LoRA config")
    places = map_adapter_names(model)
    missing, unknown = sorted(set(places) - set(stored)), sorted(set(stored) - set(places))
    if missing or unknown:
        raise CheckpointError(
            f"the adapters in {folder} do not fit the model: missing {missing[:4]} ({len(missing)} in all), unknown {unknown[:4]} "
            f"({len(unknown)} in all); wrap the model with the same LoRA config"
        )
    own = model.state_dict()
    for name, tensor in stored.items():
        if own[places[name]].shape != tensor.shape:
            raise CheckpointError(
                f"{name} in {folder} has shape {tuple(tensor.shape)}, not {tuple(own[places[name]].shape)}; use the same LoRA config"
            )
    return places


def write_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path) -> None:
    """Write tensors to optimizer.safetensors under `<number of the parameter>/<name>`, everything
    else to optimizer.json."""
    state = optimizer.state_dict()
    tensors = {
        f"{parameter}/{name}": value.detach().cpu().contiguous()
        for parameter, entries in state["state"].items()
        for name, value in entries.items()
        if isinstance(value, Tensor)
    }
    save_file(tensors, folder / "optimizer.safetensors")
    write_json(folder / "optimizer.json", describe_optimizer(optimizer, state))


def describe_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of an optimizer's state dict that are not tensors, as JSON values."""
    values: dict[str, dict[str, Any]] = {}
    for parameter, entries in state["state"].items():
        for name, value in entries.items():
            if not isinstance(value, Tensor):
                values.setdefault(str(parameter), {})[name] = value
    groups = [
        {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in state["param_groups"]
    ]
    return {"class": type(optimizer).__name__, "values": values, "param_groups": groups}


def read_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path) -> None:
    """Restore what `write_optimizer` or `sharded_files` wrote, on any number of ranks. Each reads
    its own parts."""
    stored = read_json(folder / "optimizer.json")
    if stored["class"] != type(optimizer).__name__:
        raise CheckpointError(f"{folder} is of {stored['class']}, the optimizer is {type(optimizer).__name__}; use the same")
    sizes = [[len(group["params"]) for group in groups] for groups in (stored["param_groups"], optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"the optimizer state in {folder} has groups of {sizes[0]} parameters, not {sizes[1]}; train the same parameters"
        )
    # Position among all groups. Older versions wrote the names of sharded parameters as keys.
    numbers = {str(key): number for number, key in enumerate(key for group in stored["param_groups"] for key in group["params"])}
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, entries in stored["values"].items():
        state.setdefault(numbers[key], {}).update(entries)
    files = stored.get("shards", ["optimizer.safetensors"])
    check_in_folder(files, folder / "optimizer.json")
    with StoredTensors([folder / name for name in files]) as tensors:
        for key, like in tensors.describe().items():
            parameter, name = key.rsplit("/", 1)
            number = numbers[parameter]
            state.setdefault(number, {})[name] = _read_state(tensors, key, like, stepped[number])
    groups = [
        # JSON turns tuples into lists; this turns them back.
        {name: tuple(value) if isinstance(like.get(name), tuple) else value for name, value in group.items()}
        | {"params": [numbers[str(key)] for key in group["params"]]}
        for group, like in zip(stored["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _read_state(tensors: StoredTensors, key: str, like: Tensor, parameter: Tensor) -> Tensor:
    """A tensor of a parameter's state, shared out as the parameter. One of another shape, such as a
    count of steps, is whole on each rank."""
    if like.shape != parameter.shape:
        return tensors.read(key)
    return make_shard(tensors.read(key, find_own_region(parameter)), parameter)


def read_optimizer_if_stored(optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path) -> None:
    """`read_optimizer`. If the folder has no state, warn and leave the optimizer as it is."""
    if (folder / "optimizer.json").exists():
        read_optimizer(optimizer, model, folder)
    else:
        logger.warning("%s has no optimizer state; the optimizer keeps the state that it has", folder)


ExpertParts = list[list[str]]
"""Where the values of a model's tensor [experts, rows, ...] are stored: names of tensors [rows of
the part, ...]. For each part that follows the other in the rows, one for each expert."""


class FusedExperts:
    """`StoredTensors` by the names of the model."""

    def __init__(self, stored: StoredTensors, places: Mapping[str, str | ExpertParts]) -> None:
        """`places`: the model's name of a tensor -> its name in the files, or what it is made
        of."""
        self._stored, self._places = stored, places
        self._described = stored.describe()

    def describe(self) -> dict[str, Tensor]:
        """As `StoredTensors.describe`. Raises CheckpointError for experts of several shapes."""
        return {name: self._describe(name, place) for name, place in self._places.items()}

    def _describe(self, name: str, place: str | ExpertParts) -> Tensor:
        if isinstance(place, str):
            return self._described[place]
        shapes = [{self._described[stored].shape for stored in part} for part in place]
        counts = {len(part) for part in place}
        if len(counts) > 1 or any(len(shape) > 1 for shape in shapes):
            raise CheckpointError(f"{name} is stored in {sorted(counts)} experts of the shapes {shapes}; all must be alike")
        first, rows = self._described[place[0][0]], sum(shape.pop()[0] for shape in shapes)
        return torch.empty([counts.pop(), rows, *first.shape[1:]], dtype=first.dtype, device="meta")

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """As `StoredTensors.read`. Reads no expert and no row that is outside of the region."""
        place = self._places[name]
        if isinstance(place, str):
            return self._stored.read(place, region)
        like = self._describe(name, place)
        experts, rows, *others = tuple((0, size) for size in like.shape) if region is None else region
        result = torch.empty([stop - start for start, stop in (experts, rows, *others)], dtype=like.dtype)
        begin = 0
        for part in place:
            size = self._described[part[0]].shape[0]
            own = intersect(((begin, begin + size),), (rows,))
            if own is not None:
                [(start, stop)] = own
                for expert in range(*experts):
                    values = self._stored.read(part[expert], ((start - begin, stop - begin), *others))
                    result[expert - experts[0], start - rows[0] : stop - rows[0]] = values
            begin += size
        return result


def find_fused(model: nn.Module, stored: StoredTensors) -> FusedExperts | None:
    """The tensors in the files by the names of the model, as transformers converts them. None if
    transformers has no such conversion, or one that needs whole tensors."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = list_transforms(model) if isinstance(model, PreTrainedModel) else []
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    patterns = {pattern: each for each in converters for pattern in each.source_patterns}
    if not transforms or not all(map(_stacks_experts, converters)):
        return None
    places: dict[str, str] = {}
    sources: dict[str, dict[str, list[str]]] = {}
    for name in stored.names():
        target, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            places[target] = name
        else:
            sources.setdefault(target, {part: [] for part in patterns[pattern].source_patterns})[pattern].append(name)
    fused = {target: [sorted(names, key=_by_number) for names in parts.values()] for target, parts in sources.items()}
    return FusedExperts(stored, {**places, **fused})


def list_transforms(model: Any) -> list[Any]:
    """What transformers does with the names of stored weights, of the parts of the model too. It
    goes by the names of classes, which sharding has changed."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    plain: Any = next(kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))
    if plain is not type(model):
        with torch.device("meta"):
            model = plain._from_config(model.config)
    return get_model_conversion_mapping(model, add_legacy=False)


def _stacks_experts(converter: Any) -> bool:
    """Whether it stacks experts, and lays their parts one after the other in the rows."""
    kinds = [type(step).__name__ for step in converter.operations]
    if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
        return False
    return [step.dim for step in converter.operations] == [0, 1][: len(kinds)]


def _by_number(name: str) -> list[int]:
    """Experts in their order: 2 before 10."""
    return [int(number) for number in re.findall(r"\d+", name)]


def find_weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """(names of the files with weights, name of a tensor -> its file). Without an index: None, and
    the files may have parts of tensors."""
    if (folder / SHARDS).exists():
        names = read_json(folder / SHARDS).get("shards")
        if not isinstance(names, list) or not names:
            raise DataError(f"{folder / SHARDS} names no shards; the checkpoint is damaged")
        check_in_folder(names, folder / SHARDS)
        return names, None
    if (folder / INDEX).exists():
        places = _read_weight_map(folder)
        return sorted(set(places.values())), places
    if (folder / MODEL).exists():
        return [MODEL], None
    pickled = [name for name in PICKLED if (folder / name).exists()]
    if pickled:
        raise CheckpointError(f"{folder} holds {pickled[0]}, which is pickled and can run code; convert it to safetensors")
    raise FileNotFoundError(f"{folder} holds no weights: neither {INDEX} nor {MODEL} nor {ADAPTER}")


def holds_whole_weights(folder: Path) -> bool:
    """Whether all files of a model are in the folder, none of them truncated. Reads no tensors."""
    try:
        read_json(folder / "config.json")
        names = set(_read_weight_map(folder).values()) if (folder / INDEX).exists() else {MODEL}
        for name in names:
            with safe_open(folder / name, framework="pt"):
                pass
    except (OSError, SafetensorError, CheckpointError, DataError):
        return False
    return True


def _read_weight_map(folder: Path) -> dict[str, str]:
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise DataError(f"{folder / INDEX} has no weight_map; the checkpoint is damaged")
    check_in_folder(places.values(), folder / INDEX)
    return places


def check_in_folder(names: Iterable[str], listing: Path) -> None:
    """Raise CheckpointError if the file `listing` names files outside of its folder."""
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{listing} names the file {name}, which is not in the folder")
