"""The manifest of a folder: the size and the hash of every file in it. It shows later whether the
folder still is what was written.

    manifest.json   {"schema": 1, "step": 50,
                     "files": {"model.safetensors": [{"size": 1048, "xxh3_128": "0f.."}], ...},
                     "xxh3_128": "a1.."}     hash of the rest of the manifest

A file has a second entry while it is replaced: both its versions are valid, so that a process that
is killed in between leaves a valid folder.

`VerifiedFolders` remembers which folders were verified, so that none is read twice while its files
stay as they are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from ludic.errors import CheckpointError
from ludic.files.atomic import name_aside, read_json, replace_folder, write_json, write_text

MANIFEST = "manifest.json"
SCHEMA = 1
HASH = "xxh3_128"
"""Name of the hash. It finds damage; it does not protect against an attacker, who can write a new
manifest."""
_BLOCK = 1 << 20
"""Bytes that are hashed in one call."""


def write_manifest(folder: Path, facts: Mapping[str, Any], *, described: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Write the manifest of the files in `folder`. It holds `facts` too. Write it last.

    `described`: what `describe_file` said of files that other processes wrote. These are not read
    again. Raises CheckpointError for one that has another size here, and for a safetensors file
    that is shorter than its header says: the file system lost what was written.
    """
    described = described or {}
    for name, entry in described.items():
        size = (folder / name).stat().st_size if (folder / name).exists() else None
        if size != entry["size"]:
            raise CheckpointError(
                f"{folder / name} has {size} bytes, not the {entry['size']} that were written; use a file system that all ranks see"
            )
    files = describe_files(folder, (name for name in _list_files(folder) if name not in described))
    files |= {name: [entry] for name, entry in described.items()}  # a network file system may list new files late
    write_hashed_json(folder / MANIFEST, {"schema": SCHEMA, **facts, "files": dict(sorted(files.items()))})


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, list[Any]]:
    """Each of the names of files in `folder` to its versions, of which it has one: size and hash.
    Every byte is read."""
    return {name: [describe_file(folder / name)] for name in names}


@contextmanager
def replace_with_manifest(target: Path) -> Iterator[Path]:
    """`replace_folder`, with a manifest of the files that the block writes."""
    with replace_folder(target) as aside:
        yield aside
        write_manifest(aside, {})


def describe_file(path: Path) -> dict[str, Any]:
    """Size and hash of a file that was just written. Raises CheckpointError for a safetensors file
    that is shorter than its header says."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise CheckpointError(f"{path} was not written whole ({error}); check the disk") from error
    return _describe(path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`. Raises CheckpointError if it is damaged."""
    content = read_json(folder / MANIFEST)
    _check_hash(folder / MANIFEST, content)
    return content


def write_hashed_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the file by the JSON of `content` with its hash."""
    write_text(path, _encode(content))


def read_hashed_json(path: Path, *, since: str) -> dict[str, Any]:
    """What `write_hashed_json` wrote. Raises CheckpointError if it is damaged. A file of an older
    version has no hash, and no key `since`."""
    content = read_json(path)
    if HASH in content or since in content:
        _check_hash(path, content)
    return {name: value for name, value in content.items() if name != HASH}


def _check_hash(path: Path, content: Mapping[str, Any]) -> None:
    if path.read_bytes() != _encode({name: value for name, value in content.items() if name != HASH}).encode():
        raise CheckpointError(f"{path.name} is damaged: its content is not what its hash says")


def hash_manifest(folder: Path) -> str | None:
    """The hash that the manifest of `folder` has of itself; None without a manifest."""
    return str(read_manifest(folder)[HASH]) if (folder / MANIFEST).exists() else None


def find_faults(folder: Path, foreign: Iterable[str] = ()) -> list[str]:
    """The faults of the files of `folder` by its manifest: one phrase for each file. Reads
    every byte. Raises OSError for a file that exists and cannot be read, and CheckpointError for a
    manifest of a newer version.

    `foreign`: names of files that are loaded too. One of these that the manifest does not
    list is a fault; other files may be added to the folder.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    if manifest["schema"] > SCHEMA:
        raise CheckpointError(f"{MANIFEST} has schema {manifest['schema']}; ludic here reads up to {SCHEMA}: update ludic")
    files: dict[str, list[dict[str, Any]]] = manifest["files"]
    faults = find_changes(folder, files)
    faults += [f"{name} was added later" for name in foreign if name not in files and (folder / name).exists()]
    if faults and hash_manifest(folder) != manifest[HASH]:
        return find_faults(folder, foreign)  # another process replaced a file meanwhile
    return faults


def find_changes(folder: Path, files: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """One phrase for each of the `files`, as `describe_files` gave them, that is another one now.
    Every byte is read."""
    faults = []
    for path, versions in ((folder / name, versions) for name, versions in files.items()):
        try:
            size = path.stat().st_size
            if all(size != version["size"] for version in versions):
                faults.append(f"{path.name} has {size:,} bytes, not {versions[-1]['size']:,}")
            elif _describe(path) not in versions:
                faults.append(f"the content of {path.name} has changed")
        except FileNotFoundError:
            faults.append(f"{path.name} is missing")
    return faults


def replace_listed_json(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Replace the JSON file `name` of a folder with a manifest. Both files are valid at any time.

    Example: `{"trainer_state.json": [old]}` becomes `[old, new]`, then the file is replaced, then
    the manifest has `[new]`.
    """
    manifest = {key: value for key, value in read_manifest(folder).items() if key != HASH}
    files = manifest["files"]
    aside = name_aside(folder / name)
    write_json(aside, content)
    new = _describe(aside)
    write_hashed_json(folder / MANIFEST, {**manifest, "files": {**files, name: [files[name][-1], new]}})
    aside.replace(folder / name)
    write_hashed_json(folder / MANIFEST, {**manifest, "files": {**files, name: [new]}})


def _encode(content: Mapping[str, Any]) -> str:
    """The text of a manifest: `content`, and at the end the hash of its JSON."""
    plain = json.dumps(content, indent=2)
    return json.dumps({**content, HASH: xxhash.xxh3_128_hexdigest(plain.encode())}, indent=2) + "\n"


def _list_files(folder: Path) -> list[str]:
    """Paths of all files in the folder, relative to it. Not the manifest, hidden files, and the
    model card, which people edit."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path not in (MANIFEST, "README.md") and not path.startswith("."))


def _describe(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return {"size": path.stat().st_size, HASH: digest.hexdigest()}


SETTLED_NS = 2 * 10**9
"""A file that was changed so recently may change again at the same time, as the clock of a file
system counts."""
_Stamps = tuple[tuple[str, int, int, int, int], ...]


class VerifiedFolders:
    """Folders with a manifest in which no fault was found."""

    def __init__(self) -> None:
        self._stamps: dict[Path, _Stamps] = {}

    def find_faults(self, folder: Path, verify: Callable[[Path], list[str]]) -> list[str]:
        """`verify(folder)`, which reads every byte and returns the damage; [] without reading
        if it returned that before, and every file has the size, times and inode of then."""
        before = _stamp_files(folder)
        if self._stamps.get(folder) == before:
            return []
        faults = verify(folder)
        is_settled = all(max(times) < time.time_ns() - SETTLED_NS for _, _, *times, _ in before)
        if not faults and is_settled and (folder / MANIFEST).exists():
            self._stamps[folder] = before
        return faults


def _stamp_files(folder: Path) -> _Stamps:
    """Name, size, times of the last write and of the last change in ns, and inode of each file. No
    file is read. A program can put the first of these times back, but not the second."""
    found = ((str(path.relative_to(folder)), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file())
    return tuple((name, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino) for name, facts in found)
