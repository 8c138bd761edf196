"""States of a folder: everything in it at one moment, read and written back."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

FolderState = tuple[tuple[str, str], ...]
"""(path in the folder, "folder", "-> TARGET" of a link, or digest of the content), by path. The
folder itself is "."; a folder that does not exist has no entries. Times are no part of a state."""


class FolderStates:
    """Reads states, and keeps each content once."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}

    def read(self, folder: Path) -> FolderState:
        if not folder.is_dir():
            return ()
        entries = {".": "folder"}
        for parent, folders, files in os.walk(folder):
            for name in folders + files:
                path = Path(parent, name)
                entries[str(path.relative_to(folder))] = self._describe(path)
        return tuple(sorted(entries.items()))

    def _describe(self, path: Path) -> str:
        if path.is_symlink():
            return f"-> {path.readlink()}"
        if path.is_dir():
            return "folder"
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        self._contents[digest] = content
        return digest

    def write(self, state: FolderState, folder: Path) -> None:
        """Give the folder this state."""
        shutil.rmtree(folder, ignore_errors=True)
        for name, kind in state:
            path = folder / name
            if kind == "folder":
                path.mkdir()
            elif kind.startswith("-> "):
                path.symlink_to(kind[3:])
            else:
                path.write_bytes(self._contents[kind])
