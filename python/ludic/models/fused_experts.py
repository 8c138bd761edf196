"""Mixtures of experts whose files have each expert's matrices and whose model has one tensor of all
of them. A rank reads its own part of that tensor, from the experts that are in it.

    files   experts.0.gate_proj [3, 4], experts.0.up_proj [3, 4], experts.1.gate_proj ..
    model   experts.gate_up_proj [2, 6, 4]   expert 0: its 3 rows of gate, then those of up

transformers has the names (`get_checkpoint_conversion_mapping`) and converts whole models by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import CheckpointError
from ludic.models.regions import Region, intersect
from ludic.models.tensor_files import StoredTensors


@dataclass(frozen=True)
class FusedTensor:
    """Where the values of a model's tensor [experts, rows, ...] are stored."""

    parts: list[list[str]]
    """Names of tensors [rows of the part, ...]: for each part that follows the other in the rows,
    one for each expert."""


class FusedExperts:
    """`StoredTensors` by the names of the model."""

    def __init__(self, stored: StoredTensors, places: Mapping[str, str | FusedTensor]) -> None:
        """`places`: the model's name of a tensor -> its name in the files, or what it is made
        of."""
        self._stored, self._places = stored, places
        self._described = stored.describe()

    def describe(self) -> dict[str, Tensor]:
        """As `StoredTensors.describe`. Raises CheckpointError for experts of several shapes."""
        return {name: self._describe(name, place) for name, place in self._places.items()}

    def _describe(self, name: str, place: str | FusedTensor) -> Tensor:
        if isinstance(place, str):
            return self._described[place]
        shapes = [{self._described[stored].shape for stored in part} for part in place.parts]
        counts = {len(part) for part in place.parts}
        if len(counts) > 1 or any(len(shape) > 1 for shape in shapes):
            raise CheckpointError(f"{name} is stored in {sorted(counts)} experts of the shapes {shapes}; all must be alike")
        first, rows = self._described[place.parts[0][0]], sum(shape.pop()[0] for shape in shapes)
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
        for part in place.parts:
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

    transforms = _list_transforms(model) if isinstance(model, PreTrainedModel) else []
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
    fused = {
        target: FusedTensor([sorted(names, key=_by_number) for names in parts.values()]) for target, parts in sources.items()
    }
    return FusedExperts(stored, {**places, **fused})


def _list_transforms(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    kind = type(model).__name__.removeprefix("FSDP")
    return get_checkpoint_conversion_mapping(kind) or get_checkpoint_conversion_mapping(model.config.model_type) or []


def _stacks_experts(converter: Any) -> bool:
    """Whether it stacks experts, and lays their parts one after the other in the rows."""
    kinds = [type(step).__name__ for step in converter.operations]
    if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
        return False
    return [step.dim for step in converter.operations] == [0, 1][: len(kinds)]


def _by_number(name: str) -> list[int]:
    """Experts in their order: 2 before 10."""
    return [int(number) for number in re.findall(r"\d+", name)]
