"""The interface of sandboxes in which a model works by commands, and the one of bubblewrap: this
machine's programs, over files of its own."""

from __future__ import annotations

import asyncio
import glob
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Protocol

from ludic.envs.workspaces.workspace import BubblewrapWorkspace, Ended, delete_folder, read_file, text_of_file
from ludic.errors import ConfigError
from ludic.event_loop import run_to_completion

HOME = "/root"
READ_ONLY = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "proc", "dev", "run")
"""Folders of the root that bubblewrap shows as they are on this machine, or makes itself."""
_ETC = {
    "passwd": f"user:x:1000:1000::{HOME}:/bin/bash\n",
    "group": "user:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n",
}


class Sandbox(Protocol):
    """A machine of one episode, on which commands run. It is started once, and stopped once.

    Every method may be cancelled, and then leaves nothing running. A method that fails because the
    sandbox does, and not the command, raises an exception: the episode is played again, and never
    scored.
    """

    async def start(self) -> None:
        """Make the sandbox."""

    async def exec(self, argv: Sequence[str], variables: Mapping[str, str]) -> Ended:
        """Run a program to its end, in the working directory, with these variables besides the
        sandbox's own; no process of an earlier one runs beside it. Returns its exit status, and at
        least the last 256 kB of its two streams."""

    async def put(self, source: Path, name: str) -> str:
        """Copy a folder of this machine to the absolute path `name`, whose earlier content goes.
        Returns the path."""

    async def stop(self) -> None:
        """Delete the sandbox, also one whose start has failed."""


class BubblewrapRoot(BubblewrapWorkspace):
    """A `Sandbox` without an image: `/usr` and the programs of this machine to read alone, and in
    place of its other files a copy of `copies`, pairs of a file or folder and its place.

    Commands may write in the folders of the root that the copies have, in `folder`, where they
    run, and in `/root`, `/tmp`, `/logs`; what they write is there for later ones. `/etc` they may
    read.
    """

    def __init__(
        self,
        copies: Sequence[tuple[Path, str]] = (),
        *,
        folder: str = HOME,
        env: Mapping[str, str] = MappingProxyType({}),
        texts: Mapping[str, str] = MappingProxyType({}),
        mounts: Sequence[str] = (),
    ) -> None:
        """`texts`: further files of `folder`, by their names."""
        super().__init__(mounts)
        self.folder, self._copies, self._env, self._texts = folder, copies, env, texts

    @property
    def variables(self) -> dict[str, str]:
        return {**super().variables, "HOME": HOME, **self._env}

    async def start(self, files: Path | None = None, texts: Mapping[str, str] = MappingProxyType({})) -> None:
        await run_to_completion(asyncio.to_thread(self._build, files, {**self._texts, **texts}))

    async def exec(self, argv: Sequence[str], variables: Mapping[str, str]) -> Ended:
        return await super().exec(argv, {**self.variables, **variables})

    async def put(self, source: Path, name: str) -> str:
        """`name` may also be that of a folder that is shown to read alone, as to other workspaces.
        An absolute one is a new folder of the root, which no link that a command made can lead
        elsewhere."""
        if not name.startswith("/"):
            return await super().put(source, name)
        place = self._files / PurePosixPath(name).relative_to("/")
        if place.parent != self._files:
            raise ConfigError(f"{name} cannot be put into bubblewrap, but a folder of the root, such as /tests")
        await run_to_completion(asyncio.to_thread(self._replace, source, place))
        return name

    async def get(self, name: str) -> str | None:
        return text_of_file(await self.exec(read_file(name), {}))

    def _build(self, files: Path | None, texts: Mapping[str, str]) -> None:
        for name in ("tmp", "logs", "etc", HOME, self.folder):
            self._place(name).mkdir(parents=True, exist_ok=True)
        for name, text in _ETC.items():
            (self._place("etc") / name).write_text(text)
        for source, name in [*self._copies, *([] if files is None else [(files, self.folder)])]:
            place = self._place(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True) if source.is_dir() else shutil.copy2(source, place)
        for name, text in texts.items():
            (self._place(self.folder) / name).write_text(text, encoding="utf-8", errors="replace")
        self._give(self._files)

    def _replace(self, source: Path, place: Path) -> None:
        if place.is_dir():
            delete_folder(place)
        shutil.copytree(source, place, symlinks=True)
        self._give(place)

    def _place(self, name: str) -> Path:
        return self._files / name.lstrip("/")

    def _show_files(self) -> list[str]:
        shown = ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]  # to which links in /usr lead
        for path in sorted(self._files.iterdir()):
            if path.name != "etc":
                shown += ["--bind", str(path), f"/{path.name}"]
        for path in sorted((self._files / "etc").iterdir()):
            shown += ["--ro-bind", str(path), f"/etc/{path.name}"]
        return shown


def find_copies(folder: Path, sources: Sequence[str], target: str) -> list[tuple[Path, str]]:
    """What `COPY sources target` of a Dockerfile copies from its `folder`: files and folders of
    this machine, and their absolute paths. `target` is absolute. Raises ConfigError for a source
    that is not there, or not in the folder."""
    found: list[tuple[Path, str]] = []
    is_folder = len(sources) > 1 or target.endswith("/")
    for source in sources:
        matches = [Path(each) for each in sorted(glob.glob(glob.escape(f"{folder}/") + source.lstrip("/")))]
        inside = folder.resolve()
        if not matches or not all(each.resolve().is_relative_to(inside) for each in matches):
            raise ConfigError(f"COPY {source}: there is no such file in {folder}")
        for each in matches:
            into = is_folder or len(matches) > 1
            found.append((each, target if each.is_dir() or not into else f"{target.rstrip('/')}/{each.name}"))
    return found
