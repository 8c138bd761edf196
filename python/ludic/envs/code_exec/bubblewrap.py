"""Sandboxes by bubblewrap: no daemon and no image, and one starts in about 0.1 s.

A program sees `/usr` and the interpreter, read-only, an empty `/workspace`, `/tmp` and `/dev/shm`
of limited size, its own processes, and nothing else: no network, no other file, no variable of the
environment. It has no capability, and a filter refuses most of the kernel's interface
(`ludic.envs.code_exec.seccomp`). The remaining risk is the kernel itself: a program that exploits a
fault of the kernel gets out, and programs on the same processor can be timed. `docs/code.md` says
more.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.envs.code_exec.pool import BaseSandboxPool
from ludic.envs.code_exec.process_sandbox import LONGEST_REPLY, ProcessSandbox, first_process
from ludic.envs.code_exec.seccomp import seccomp_filter
from ludic.envs.line_process import LineProcess
from ludic.errors import ConfigError, MissingExtraError

PLACES = {"/workspace": 64, "/tmp": 16, "/dev/shm": 16}
"""Where a program can write, and how many megabytes."""
OWN_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
"""Of this interpreter."""
NOBODY = 65_534
"""The user that programs run as if this process is root: limits of processes do not hold for
root."""


@dataclass(frozen=True)
class BubblewrapConfig:
    """Settings of all sandboxes of a pool."""

    python_version: str | None = None
    """As `3.11`. None means this interpreter's."""
    memory_limit_mb: int = 256
    """Of a program, unless its test says otherwise."""


TRIAL_S = 30.0


def is_bubblewrap_available() -> bool:
    """Whether bubblewrap is installed, and this user may make namespaces with it."""
    program = shutil.which("bwrap")
    if sys.platform != "linux" or program is None:
        return False
    trial = [program, "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "true"]
    try:
        ended = subprocess.run(trial, capture_output=True, stdin=subprocess.DEVNULL, timeout=TRIAL_S, **as_nobody())
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0


def as_nobody() -> dict[str, Any]:
    """Arguments of Popen that give up the rights of root, if this process has them."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


class BubblewrapProcess(LineProcess):
    """The first process of a sandbox."""

    def __init__(self, config: BubblewrapConfig) -> None:
        program = shutil.which("bwrap")
        if program is None:
            raise MissingExtraError("bubblewrap is not installed; `apt install bubblewrap` installs it")
        self._as_nobody = os.geteuid() == 0
        python = find_python(config.python_version, others=self._as_nobody)
        unreadable = [str(path) for path in (python, Path(program)) if not can_be_read_by_others(path)]
        if self._as_nobody and unreadable:
            raise ConfigError(f"{' and '.join(unreadable)} must be readable by all users; install with apt or do not run as root")
        super().__init__(
            [program, *sandbox_arguments(python)], start_timeout_s=30.0, name="the sandbox", longest_reply=LONGEST_REPLY
        )

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._new_stderr(),
            env={},
            cwd="/",
            start_new_session=True,
            **as_nobody(),
        )


class BubblewrapSandboxPool(BaseSandboxPool):
    """A pool of `n_workers` sandboxes by bubblewrap."""

    def __init__(
        self,
        n_workers: int = 4,
        config: BubblewrapConfig | None = None,
        cache_size: int = 10_000,
        auto_replace_failed: bool = True,
        max_consecutive_failures: int = 5,
        max_concurrent_ops: int = 8,
    ) -> None:
        super().__init__(n_workers, cache_size, auto_replace_failed, max_consecutive_failures, max_concurrent_ops)
        self._config = config or BubblewrapConfig()

    @property
    def python_version(self) -> str:
        return self._config.python_version or OWN_VERSION

    async def _start_sandbox(self) -> ProcessSandbox:
        return await ProcessSandbox.started(BubblewrapProcess(self._config), memory_limit_mb=self._config.memory_limit_mb)


def sandbox_arguments(python: Path) -> list[str]:
    """The arguments of bwrap: namespaces, mounts, and the command."""
    arguments = ["--as-pid-1", *isolate(python)]
    # Reads as zeros, but cannot be mapped, which makes memory that no process is charged for.
    arguments += ["--dev-bind", "/dev/full", "/dev/zero"]
    for place, megabytes in PLACES.items():
        arguments += ["--size", str(megabytes << 20), "--tmpfs", place]
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--clearenv"]
    for name, value in {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}.items():
        arguments += ["--setenv", name, value]
    return [*arguments, "--", *first_process(str(python), list(PLACES), system_call_filter=seccomp_filter())]


def isolate(python: Path) -> list[str]:
    """The arguments of bwrap for namespaces, no capability, and a system to read alone."""
    arguments = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
    arguments += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            arguments += ["--ro-bind", name, name]
    arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    if not python.is_relative_to("/usr"):
        libraries = python.parent.parent / "lib"
        for path in (python, libraries / python.name, *sorted(libraries.glob("libpython*.so*"))):
            arguments += ["--ro-bind-try", str(path), str(path)]
    return [*arguments, "--proc", "/proc", "--dev", "/dev"]


def find_python(version: str | None, *, others: bool = False) -> Path:
    """An interpreter of this version, its links followed. None means this interpreter's version.

    `others` prefers one that every user of this machine can read. ConfigError if there is none.
    """
    wanted = version or OWN_VERSION
    own = Path(getattr(sys, "_base_executable", None) or sys.executable)
    names = [own] if wanted == OWN_VERSION else []
    names += [Path(folder) / f"python{wanted}" for folder in ("/usr/bin", "/usr/local/bin")]
    if (found := shutil.which(f"python{wanted}")) is not None:
        names.append(Path(found))
    paths = [path.resolve() for path in names if path.exists()]
    if not paths:
        raise ConfigError(f"there is no python{wanted}; install it, or choose None (this interpreter's, {OWN_VERSION})")
    readable = [path for path in paths if can_be_read_by_others(path)]
    return readable[0] if others and readable else paths[0]


def can_be_read_by_others(path: Path) -> bool:
    """Whether every user can run the file: it and all folders above it allow that."""
    return all(part.stat().st_mode & stat.S_IXOTH for part in (path, *path.parents))
