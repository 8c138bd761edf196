"""The backends of sandboxes, which of them work on this machine, and pools of them by their names;
and the one without a sandbox, for programs that are trusted.

A backend is checked on its first use, so that nothing is imported or started before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from ludic.distribution import install_command
from ludic.envs.code_exec.bubblewrap import (
    OWN_VERSION,
    TRIAL_S,
    BubblewrapConfig,
    BubblewrapSandboxPool,
    find_python,
    is_bubblewrap_available,
)
from ludic.envs.code_exec.docker_sandbox import DockerSandboxConfig, DockerSandboxPool, connect
from ludic.envs.code_exec.podman_sandbox import PodmanConfig, PodmanHPCSandboxPool, run_podman
from ludic.envs.code_exec.pool import BaseSandboxPool
from ludic.envs.code_exec.process_sandbox import LONGEST_REPLY, ProcessSandbox, first_process
from ludic.envs.code_exec.types import NoSandboxError
from ludic.envs.line_process import LineProcess
from ludic.errors import ConfigError, LudicError, check_value


class UnsupportedBackendError(NoSandboxError, NotImplementedError):
    """A backend with a documented name that cannot be chosen."""


class SandboxBackend(StrEnum):
    AUTO = "auto"
    """The first that works: bubblewrap, then Docker and Podman, in a Slurm job podman-hpc first."""
    BUBBLEWRAP = "bubblewrap"
    DOCKER = "docker"
    PODMAN = "podman"
    PODMAN_HPC = "podman-hpc"
    SINGULARITY = "singularity"
    UNSAFE_SUBPROCESS = "unsafe_subprocess"
    """No sandbox. Never chosen by `auto`."""


REQUIRES = {
    SandboxBackend.BUBBLEWRAP: "`apt install bubblewrap`, and user namespaces that this user may create",
    SandboxBackend.DOCKER: f"a Docker daemon that this user reaches, and `{install_command('docker')}`",
    SandboxBackend.PODMAN: "`apt install podman`, and `podman info` succeeds",
    SandboxBackend.PODMAN_HPC: "podman-hpc, which the computing centre installs, and `podman-hpc info` succeeds",
    SandboxBackend.SINGULARITY: "Singularity or Apptainer",
}
ROOT = Path(__file__).parents[4]
"""Of a checkout, if this file is in one."""
_UNSUPPORTED = {SandboxBackend.SINGULARITY: "not yet implemented"}
"""Documented backends that cannot be chosen, and why."""


def is_docker_available() -> bool:
    """Whether the `docker` package is installed and a daemon answers."""
    try:
        connect(timeout_s=5).close()
    except LudicError:
        return False
    return True


def is_podman_available() -> bool:
    return is_program_ready("podman")


def is_podman_hpc_available() -> bool:
    return is_program_ready("podman-hpc")


def is_singularity_available() -> bool:
    return shutil.which("singularity") is not None or shutil.which("apptainer") is not None


def detect_available_backend() -> SandboxBackend:
    """The backend that `auto` means here. NoSandboxError, a RuntimeError, if there is none."""
    for backend in _order():
        if _checks()[backend]():
            return backend
    choices = "; ".join(f"{backend}: {REQUIRES[backend]}" for backend in _order())
    raise NoSandboxError(
        f"No sandbox backend; install one of {choices}.{_in_a_checkout()} Trusted programs run with backend='unsafe_subprocess'"
    )


def parse_backend(name: str) -> SandboxBackend:
    """ConfigError for an unknown name, UnsupportedBackendError for one that cannot be chosen."""
    if name not in list(SandboxBackend):
        raise ConfigError(f"Unknown backend {name!r}; it must be one of {', '.join(SandboxBackend)}")
    backend = SandboxBackend(name)
    if backend in _UNSUPPORTED:
        raise UnsupportedBackendError(f"{backend.capitalize()} backend is {_UNSUPPORTED[backend]}; use bubblewrap")
    return backend


def choose_backend(name: str) -> SandboxBackend:
    """The backend of this name, which for `auto` is one that works. ConfigError for an unknown
    name, NoSandboxError if it does not work here."""
    chosen = parse_backend(name)
    if chosen is SandboxBackend.AUTO:
        return detect_available_backend()
    if chosen is not SandboxBackend.UNSAFE_SUBPROCESS and not _checks()[chosen]():
        raise NoSandboxError(f"the backend {chosen} does not work here; it needs {REQUIRES[chosen]}")
    return chosen


def get_backend_info() -> dict[str, Any]:
    """What works here: `{"environment": {...}, "backends": {name: {"available", "requires"}}}`."""
    backends = {}
    for backend, is_available in _checks().items():
        backends[backend.value] = {"available": is_available(), "requires": REQUIRES[backend]}
        if backend in _UNSUPPORTED:
            backends[backend.value]["note"] = _UNSUPPORTED[backend]
    job = os.environ.get("SLURM_JOB_ID")
    return {"environment": {"in_slurm": job is not None, "slurm_job_id": job}, "backends": backends}


def is_program_ready(name: str) -> bool:
    """Whether Podman, podman-hpc or Docker's command line is installed, and says so of itself in
    time: this user may be without namespaces, a folder for images, or a daemon."""
    path = shutil.which(name)
    try:
        return path is not None and run_podman([path, "info"], timeout_s=TRIAL_S).returncode == 0
    except (OSError, LudicError):
        return False


def _in_a_checkout(root: Path = ROOT) -> str:
    """How bubblewrap is had without installing it, which a checkout of this library knows."""
    if not (root / ".ci" / "get-program").exists():
        return ""
    return f" Here, `make -C {root} bubblewrap && export PATH={root / 'target' / 'bubblewrap'}:$PATH` fetches bubblewrap and uses it."


def _order() -> list[SandboxBackend]:
    containers = [SandboxBackend.DOCKER, SandboxBackend.PODMAN_HPC, SandboxBackend.PODMAN]
    if "SLURM_JOB_ID" in os.environ:
        containers = [SandboxBackend.PODMAN_HPC, SandboxBackend.DOCKER, SandboxBackend.PODMAN]
    return [SandboxBackend.BUBBLEWRAP, *containers]


def _checks() -> dict[SandboxBackend, Callable[[], bool]]:
    return {
        SandboxBackend.BUBBLEWRAP: is_bubblewrap_available,
        SandboxBackend.DOCKER: is_docker_available,
        SandboxBackend.PODMAN: is_podman_available,
        SandboxBackend.PODMAN_HPC: is_podman_hpc_available,
        SandboxBackend.SINGULARITY: is_singularity_available,
    }


async def create_sandbox_pool(
    n_workers: int = 4,
    backend: str = "auto",
    python_version: str | None = "3.11",
    cache_size: int = 10_000,
    max_concurrent_ops: int = 8,
    workspace_base_dir: str = "auto",
    **backend_kwargs: Any,
) -> BaseSandboxPool:
    """A pool that is started; `await pool.shutdown()` ends it.

    `backend` is a `SandboxBackend`. `python_version` None is this interpreter's. Workspaces are in
    memory: `workspace_base_dir` can only be "auto". `backend_kwargs` are further arguments of the
    backend's pool, such as its `config`; `memory_limit_mb` (256) limits a program. ConfigError
    for an unknown name or setting, NoSandboxError, a RuntimeError, if the backend does not work.
    """
    check_value("workspace_base_dir", workspace_base_dir, "what programs write is in memory", choices=["auto"])
    chosen = parse_backend(backend)
    if chosen in (SandboxBackend.AUTO, SandboxBackend.BUBBLEWRAP):
        chosen = choose_backend(backend)
    settings = {"n_workers": n_workers, "cache_size": cache_size, "max_concurrent_ops": max_concurrent_ops, **backend_kwargs}
    pool = _make_pool(chosen, python_version, settings)
    await pool.start()
    return pool


def _make_pool(backend: SandboxBackend, python_version: str | None, settings: dict[str, Any]) -> BaseSandboxPool:
    if backend is SandboxBackend.UNSAFE_SUBPROCESS:
        return UnsafeSubprocessPool(python_version=python_version, **settings)
    if backend is SandboxBackend.BUBBLEWRAP:
        config = settings.pop("config", None) or BubblewrapConfig(python_version, settings.pop("memory_limit_mb", 256))
        return BubblewrapSandboxPool(config=config, **settings)
    memory_mb = settings.pop("memory_limit_mb", 256)
    if backend is SandboxBackend.DOCKER:
        docker = DockerSandboxConfig(python_version or OWN_VERSION, memory_limit=f"{memory_mb}m")
        return DockerSandboxPool(**{"config": docker, "auto_replace_failed": True, **settings})
    podman = PodmanConfig(memory_limit=f"{memory_mb}m", command=backend.value)
    return PodmanHPCSandboxPool(**{"image": f"python:{python_version or OWN_VERSION}-slim", "config": podman, **settings})


class UnsafeProcess(LineProcess):
    """A process of this user, with a folder of its own, which it deletes if this process ends
    first."""

    def __init__(self, python: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ludic-programs-"))
        command = first_process(str(python), [str(self._folder)])
        super().__init__(command, start_timeout_s=30.0, name="the program runner", longest_reply=LONGEST_REPLY)

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._new_stderr(),
            env={"PATH": os.defpath, "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
            start_new_session=True,
        )

    def end(self) -> int | None:
        code = super().end()
        shutil.rmtree(self._folder, ignore_errors=True)
        return code


class UnsafeSubprocessPool(BaseSandboxPool):
    """**No sandbox**: programs can read and delete this user's files, and use the network. The
    limits of time, memory and output hold. Warns once."""

    def __init__(
        self,
        n_workers: int = 4,
        python_version: str | None = None,
        cache_size: int = 10_000,
        auto_replace_failed: bool = True,
        max_consecutive_failures: int = 5,
        max_concurrent_ops: int = 8,
    ) -> None:
        super().__init__(n_workers, cache_size, auto_replace_failed, max_consecutive_failures, max_concurrent_ops)
        self._python_version = python_version or OWN_VERSION
        warnings.warn("unsafe_subprocess runs programs without a sandbox, with this user's rights", RuntimeWarning, stacklevel=2)

    @property
    def python_version(self) -> str:
        return self._python_version

    async def _start_sandbox(self) -> ProcessSandbox:
        return await ProcessSandbox.started(UnsafeProcess(find_python(self._python_version)))
