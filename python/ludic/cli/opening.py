"""The recipe and the folder of a run: made, resumed, or on other ranks than 0 found where rank 0
made or resumed it."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ludic.cli.resume import Changes, parse_changes, resume_recipe, save_changes
from ludic.files.atomic import write_text
from ludic.rank_environment import read_rank_environment
from ludic.runs.directory import run_path

if TYPE_CHECKING:
    from ludic.runs.directory import RunDirectory

LAUNCHER = ".launcher"
"""File in the folder of a run on several ranks: which processes started them, a line for each."""

D = TypeVar("D", bound="RunDirectory")
D_co = TypeVar("D_co", bound="RunDirectory", covariant=True)


class OpeningCommand(Protocol[D_co]):
    """The members of a command that open its runs."""

    @property
    def directory(self) -> type[D_co]: ...

    def compose(self, arguments: Sequence[str]) -> Any: ...

    def folder_name(self, recipe: Any) -> str: ...


def open_run(command: OpeningCommand[D], arguments: Sequence[str], resume: Path | None, *, follows: bool) -> tuple[Any, D | None]:
    """The recipe of the command line; for a run that is resumed, that of its folder, and the
    folder. `follows`: this is another rank than 0, which resumes the run.

    An agent of torchrun that starts its ranks again gives them the same command line: they resume
    the run that they began before. None of them can tell by itself that it was started again."""
    changes = Changes() if resume is None else parse_changes(arguments, command.directory.command)
    environment = read_rank_environment()
    if resume is None:
        recipe = command.compose(arguments)
        resume = _find_begun(command, recipe) if environment is not None and environment.run_id else None
        if resume is None:
            return recipe, None
    if environment is None:
        return _resume(command, resume, changes)
    from ludic.training import ranks

    opened: list[tuple[Any, D]] = []
    with ranks.rank_0_alone(f"resuming {resume}"):
        if not follows:
            opened.append(_resume(command, resume, changes))
    if not follows:
        return opened[0]
    directory = command.directory.follow(resume)
    return command.compose([str(directory.config)]), directory


def _find_begun(command: OpeningCommand[D], recipe: Any) -> Path | None:
    """The folder of the run that one of the present launchers has begun or resumed before; None if
    they did not get so far. Machines come and go: those that are new are written down, too."""
    from ludic.training import ranks

    launchers = ranks.gather_json(_name_launcher())

    def find() -> str | None:
        runs = run_path(recipe.output, recipe.name, command.folder_name(recipe)).parent
        for mark in sorted(runs.glob(f"*/{LAUNCHER}"), key=lambda mark: mark.stat().st_mtime, reverse=True):
            known = mark.read_text(encoding="utf-8").splitlines()
            if not set(known).isdisjoint(launchers):
                _write_launchers(mark, [*known, *launchers])
                return str(mark.parent.resolve())
        return None

    folder = ranks.ask_rank_0("looking for the run that was begun", find)
    return None if folder is None else Path(folder)


def _write_launchers(mark: Path, launchers: Sequence[str]) -> None:
    write_text(mark, "".join(f"{name}\n" for name in dict.fromkeys(launchers)))


def _name_launcher() -> str:
    """Names the process that started this rank, and starts it again, and the command. Its start
    time tells it from another one with its number."""
    parent = os.getppid()
    command = hashlib.sha256("\0".join(sys.argv[1:]).encode(errors="surrogateescape")).hexdigest()[:16]
    return f"{socket.gethostname()} {parent} {_read_start_time(parent)} {command}"


def _read_start_time(process: int) -> str:
    """Clock ticks since the system started; empty where the system does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _resume(command: OpeningCommand[D], resume: Path, changes: Changes) -> tuple[Any, D]:
    directory = command.directory.resume(resume)
    try:
        recipe = command.compose([str(directory.config), *changes.texts])
        recipe = resume_recipe(recipe, directory, changes)
        save_changes(changes, recipe, directory)
        return recipe, directory
    except BaseException:
        directory.release()
        raise


def begin_run(command: OpeningCommand[D], recipe: Any) -> D:
    """The folder of a new run, which rank 0 makes."""
    from ludic.training import ranks

    made: list[D] = []
    launchers = ranks.gather_json(_name_launcher())
    with ranks.rank_0_alone("making the run's folder") as shared:
        if ranks.rank() == 0:
            made.append(command.directory.begin(recipe, command.folder_name(recipe)))
            if ranks.is_distributed():
                _write_launchers(made[0].path / LAUNCHER, launchers)
            shared.append(str(made[0].path.resolve()))
    return made[0] if made else command.directory.follow(Path(shared[0]))
