"""Which files of a folder have the weights of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ludic.errors import CheckpointError, DataError
from ludic.files.atomic import read_json
from ludic.files.checkpoints import ADAPTER, INDEX, MODEL, PICKLED, SHARDS


def find_weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """(names of the files with weights, name of a tensor -> its file). Without an index: None, and
    the files may have parts of tensors."""
    if (folder / SHARDS).exists():
        return _read_shard_names(folder), None
    if (folder / INDEX).exists():
        places = _read_weight_map(folder)
        return sorted(set(places.values())), places
    if (folder / MODEL).exists():
        return [MODEL], None
    pickled = [name for name in PICKLED if (folder / name).exists()]
    if pickled:
        raise CheckpointError(
            f"{folder} holds {pickled[0]}, which is pickled: reading it can run code. Convert it to safetensors where you trust it"
        )
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


def _read_shard_names(folder: Path) -> list[str]:
    names = read_json(folder / SHARDS).get("shards")
    if not isinstance(names, list) or not names:
        raise DataError(f"{folder / SHARDS} names no shards; the checkpoint is damaged")
    check_in_folder(names, folder / SHARDS)
    return names


def check_in_folder(names: Iterable[str], listing: Path) -> None:
    """Raise CheckpointError if the file `listing` names files outside of its folder."""
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{listing} names the file {name}, which is not in the folder")


def read_indexed(folder: Path, files: Iterable[str], places: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    for name in files:
        with safe_open(folder / name, framework="pt") as shard:
            stored = set(shard.keys())
            for key in (key for key, place in places.items() if place == name):
                if key not in stored:
                    raise KeyError(f"{key} is not in {folder / name}, where the index puts it; the checkpoint is damaged")
                yield key, shard.get_tensor(key)
