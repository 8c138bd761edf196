"""Writes the weights of a folder, whole or in shards, as one Hugging Face folder, tensor by tensor.

    step_000050/model-0000r-of-0000W.safetensors  ->  out/model.safetensors        (up to 5 GB)
    step_000050/adapter_model.safetensors         ->  out/adapter_model.safetensors, or merged
                                                      into the weights of the base model

No model is built. The memory needed is one bucket of tensors, whatever the size of the model.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludic.errors import ConfigError
from ludic.files.atomic import read_json, write_json
from ludic.files.checkpoints import ADAPTER, ADAPTER_CONFIG, INDEX, MODEL
from ludic.models.names import WRAPPING, is_adapter
from ludic.models.regions import split_in_buckets
from ludic.models.state_files import find_weight_files
from ludic.models.tensor_files import StoredTensors, TensorFileWriter

FILE_BYTES = 5_000_000_000
"""A file of weights ends with the tensor that brings it to this number of bytes."""
READ_BYTES = 256 << 20
"""Bytes of tensors that are read before the files are opened again, which frees what was mapped."""
OUT_A, OUT_B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class _Tensors:
    """Tensors in the files of a folder."""

    folder: Path
    files: list[str]
    places: dict[str, str] | None

    def open(self) -> StoredTensors:
        return StoredTensors([self.folder / name for name in self.files], places=self.places)

    def describe(self) -> dict[str, Tensor]:
        with self.open() as stored:
            return stored.describe()


def export_model(folder: Path, out: Path, dtype: torch.dtype | None = None) -> None:
    """Write the weights and the config of `folder` to the empty folder `out`. Floating-point
    weights become `dtype`; with None they keep theirs. Raises ConfigError for a folder that
    `from_pretrained` could not open."""
    _copy(_Tensors(folder, *find_weight_files(folder)), out, dtype)
    _write_config(folder, out, dtype)


def export_adapter(folder: Path, out: Path, *, base: str | None, dtype: torch.dtype | None = None) -> None:
    """Write the adapters of `folder` to the empty folder `out`, as PEFT and vLLM load them. They
    name `base` as the model that they adapt; with None the name stays."""
    _copy(_Tensors(folder, [ADAPTER], None), out, dtype, single=ADAPTER)
    config = read_json(folder / ADAPTER_CONFIG)
    write_json(out / ADAPTER_CONFIG, config if base is None else {**config, "base_model_name_or_path": base})


def export_merged(folder: Path, base: Path, out: Path, dtype: torch.dtype | None = None) -> None:
    """Write the model of the folder `base` with the adapters of `folder` merged to the empty folder
    `out`. A weight is merged in float32 and rounded once. Raises ConfigError for adapters other
    than LoRA on layers whose weights the base has, and for adapters of a classifier."""
    adapters = _Adapters.read(folder)
    tensors = _Tensors(base, *find_weight_files(base))
    adapters.check(tensors.describe(), folder, base)
    _copy(tensors, out, dtype, adapters.merge)
    _write_config(base, out, dtype)


def _copy(
    tensors: _Tensors,
    out: Path,
    dtype: torch.dtype | None,
    change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    *,
    single: str | None = None,
) -> None:
    """Write the tensors to files of at most about `FILE_BYTES`, or to the `single` one, and their
    index."""
    described, layout = tensors.describe(), {}
    for name, like in described.items():  # whole numbers and quantised weights of 8 bits keep their dtype
        is_weight = like.dtype.is_floating_point and like.element_size() > 1
        layout[name] = torch.empty(like.shape, dtype=dtype if dtype and is_weight else like.dtype, device="meta")
    sizes, stored_sizes = (
        {name: like.numel() * like.element_size() for name, like in each.items()} for each in (layout, described)
    )
    parts = [list(sizes)] if single else split_in_buckets(sizes, FILE_BYTES)
    places: dict[str, str] = {}
    for number, names in enumerate(parts):
        file = single or (MODEL if len(parts) == 1 else f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors")
        with TensorFileWriter(out / file, {name: layout[name] for name in names}) as writer:
            for bucket in split_in_buckets({name: stored_sizes[name] for name in names}, READ_BYTES):
                with tensors.open() as stored:
                    for name in bucket:
                        writer.write(name, change(name, stored.read(name)).to(layout[name].dtype))
        places |= dict.fromkeys(names, file)
    if len(parts) > 1:
        write_json(out / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places})


def _write_config(folder: Path, out: Path, dtype: torch.dtype | None) -> None:
    config = read_json(folder / "config.json")
    if "model_type" not in config:
        raise ConfigError(f"{folder / 'config.json'} names no model_type of transformers, and from_pretrained could not open it")
    if dtype is not None:
        config = {key: value for key, value in config.items() if key != "torch_dtype"}  # the older name
        config["dtype"] = str(dtype).removeprefix("torch.")
    write_json(out / "config.json", config)
    if (folder / "generation_config.json").is_file():
        shutil.copyfile(folder / "generation_config.json", out / "generation_config.json")


@dataclass(frozen=True)
class _Adapters:
    """The tensors of an adapter's file, which are small, and how they are merged."""

    tensors: dict[str, Tensor]
    """Name in the model without adapters, with `.lora_A.weight` and `.lora_B.weight`, or the name
    of a weight that is trained in full."""
    config: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> _Adapters:
        with StoredTensors([folder / ADAPTER]) as stored:
            tensors = {name.removeprefix(WRAPPING): stored.read(name).clone() for name in stored.describe()}
        return cls(tensors, read_json(folder / ADAPTER_CONFIG))

    def check(self, base: Mapping[str, Tensor], folder: Path, place: Path) -> None:
        """Raise ConfigError for what `merge` does not know."""
        config = self.config
        other = [name for name in ("use_dora", "lora_bias", "alora_invocation_tokens") if config.get(name)]
        if config.get("peft_type") != "LORA" or other or config.get("bias", "none") != "none":
            raise ConfigError(
                f"{folder} has other adapters ({', '.join(other) or config.get('peft_type')}) than LoRA; merge with PEFT"
            )
        if config.get("task_type") == "SEQ_CLS":
            raise ConfigError(f"{folder} adapts a classifier, whose head {place} lacks; use the folder `model` of the run")
        for name in self.tensors:
            plain = name.removesuffix(OUT_A).removesuffix(OUT_B)
            target = f"{plain}.weight" if plain != name else name
            if target not in base or (plain == name and is_adapter(name)):
                raise ConfigError(
                    f"{folder} adapts {target}, which {place} does not store; merge with ludic.models.loading.load_model"
                )
            like = base[target]
            if not like.dtype.is_floating_point or like.element_size() == 1:
                raise ConfigError(f"{folder} adapts {target}, which {place} has quantised ({like.dtype}); export without --merge")

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """The weight `name` of the base with its adapter, [out, in] (the other way round for
        `fan_in_fan_out`): W + scaling B A."""
        if name in self.tensors:
            return self.tensors[name]
        layer = name.removesuffix(".weight")
        if layer + OUT_A not in self.tensors:
            return weight
        from peft.utils.other import get_pattern_key

        down, up = self.tensors[layer + OUT_A].float(), self.tensors[layer + OUT_B].float()
        delta, rank = up @ down, down.shape[0]
        # A layer may have an alpha of its own. Patterns of PEFT match whole parts of its name, so
        # that `q_proj` is not for `my_q_proj`.
        own = self.config.get("alpha_pattern") or {}
        alpha = float(own.get(get_pattern_key(own.keys(), layer), self.config["lora_alpha"]))
        scaling = alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank
        return weight.float() + (delta.T if self.config.get("fan_in_fan_out") else delta) * scaling
