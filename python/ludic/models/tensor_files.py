"""Safetensors files that are written one tensor at a time, and of which parts of tensors are read.

    8 bytes   length of the header
    header    JSON: {name: {"dtype", "shape", "data_offsets": [first byte, last byte + 1]}, ...}
    tensors   in the order of their offsets, without gaps

https://huggingface.co/docs/safetensors describes the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ludic.errors import CheckpointError
from ludic.models.regions import Region, count_elements, intersect, make_slices

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Name in a file -> dtype."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
OFFSETS = "ludic_offsets"
"""Key in a file's metadata: JSON of {name: first index of each dimension}, for files that have
parts of tensors."""


class TensorFileWriter(AbstractContextManager["TensorFileWriter"]):
    """Writes a safetensors file. Its tensors may come in any order, and none is kept.

    >>> with TensorFileWriter(path, {"weight": torch.empty(2, 3, device="meta")}) as file:
    ...     file.write("weight", torch.ones(2, 3))

    The file is flushed to disk at the end of the block. Raises CheckpointError for a tensor that
    the layout does not have or that was not written.
    """

    def __init__(self, path: Path, layout: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
        """`layout`: tensors with the shapes and dtypes to come; their values are not read."""
        self.path = path
        self._layout = {name: (tensor.shape, tensor.dtype) for name, tensor in layout.items()}
        self._missing = set(layout)
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        place = 0
        # Wide types first, and a header padded to 8 bytes, so that every tensor is aligned.
        for name, (shape, dtype) in sorted(self._layout.items(), key=lambda item: (-item[1][1].itemsize, item[0])):
            size = shape.numel() * dtype.itemsize
            entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [place, place + size]}
            place += size
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._starts = {name: 8 + len(header) + entries[name]["data_offsets"][0] for name in layout}
        self._file = path.open("wb")
        self._file.write(len(header).to_bytes(8, "little") + header)

    def write(self, name: str, tensor: Tensor) -> None:
        if self._layout.get(name) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; {self.path.name} was begun with {self._layout.get(name)} for it"
            )
        self._file.seek(self._starts[name])
        self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._file:
            if kind is None:
                if self._missing:
                    raise CheckpointError(f"{sorted(self._missing)[0]} was not written to {self.path}")
                self._file.flush()
                os.fsync(self._file.fileno())


class _Part(NamedTuple):
    """The part of a tensor that a file has."""

    file: Any
    region: Region


class StoredTensors(AbstractContextManager["StoredTensors"]):
    """The tensors in one or several safetensors files, open for reading. A tensor may be cut into
    parts in several files (`OFFSETS`).

    >>> with StoredTensors([folder / "model.safetensors"]) as stored:
    ...     rows = stored.read("lm_head.weight", ((0, 100), (0, 64)))
    """

    def __init__(self, paths: Iterable[Path], *, places: Mapping[str, str] | None = None) -> None:
        """`places`: name of a tensor -> name of its file; by default all that are in the files.
        Raises CheckpointError for a file that is truncated or in another format."""
        self._open = ExitStack()
        self._parts: dict[str, list[_Part]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self.metadata: dict[str, str] = {}
        """The metadata in the headers of the files."""
        for path in paths:
            try:
                file = self._open.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                self._open.close()
                raise CheckpointError(f"{path} is damaged: {error}") from error
            self.metadata |= file.metadata() or {}
            offsets = json.loads((file.metadata() or {}).get(OFFSETS, "{}"))
            for name in file.keys():  # noqa: SIM118  it is no mapping
                if places is None or places.get(name) == path.name:
                    part = file.get_slice(name)
                    shape = part.get_shape()
                    starts = offsets.get(name) or [0] * len(shape)
                    region = tuple((start, start + size) for start, size in zip(starts, shape, strict=True))
                    self._parts.setdefault(name, []).append(_Part(file, region))
                    self._dtypes[name] = DTYPES[part.get_dtype()]

    def names(self) -> Iterable[str]:
        return self._parts.keys()

    def describe(self) -> dict[str, Tensor]:
        """Name -> an empty tensor on the device `meta` of the whole shape and the stored dtype."""
        return {name: torch.empty(self._shape(name), dtype=self._dtypes[name], device="meta") for name in self._parts}

    def _shape(self, name: str) -> list[int]:
        """Example: parts of the rows (0, 3) and (3, 5) make 5 rows."""
        regions = [part.region for part in self._parts[name]]
        return [max(stop for _, stop in ranges) for ranges in zip(*regions, strict=True)]

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """The region of a tensor, or all of it if None. Only its own bytes are read. Raises
        CheckpointError if the parts in the files do not cover it."""
        wanted = tuple((0, size) for size in self._shape(name)) if region is None else region
        parts = [part for part in self._parts[name] if part.region == wanted]
        if parts:
            whole: Tensor = parts[0].file.get_tensor(name)
            return whole
        result = torch.empty([stop - start for start, stop in wanted], dtype=self._dtypes[name])
        covered = 0
        for part in self._parts[name]:
            shared = intersect(part.region, wanted)
            if shared is not None:
                result[make_slices(shared, wanted)] = part.file.get_slice(name)[make_slices(shared, part.region)]
                covered += count_elements(shared)
        if covered != count_elements(wanted):
            raise CheckpointError(f"{name} is not whole: files have {covered} of {count_elements(wanted)} elements of {wanted}")
        return result

    def __exit__(self, *_: object) -> None:
        self._open.close()
