"""Makes a pool of sandboxes from a backend's name."""

from __future__ import annotations

from typing import Any

from ludic.envs.code_exec.backend import REQUIRES, SandboxBackend, detect_available_backend, parse_backend
from ludic.envs.code_exec.bubblewrap import OWN_VERSION, BubblewrapConfig, BubblewrapSandboxPool, is_bubblewrap_available
from ludic.envs.code_exec.docker_sandbox import DockerSandboxConfig, DockerSandboxPool
from ludic.envs.code_exec.podman_sandbox import PodmanConfig, PodmanHPCSandboxPool
from ludic.envs.code_exec.pool import BaseSandboxPool
from ludic.envs.code_exec.types import NoSandboxError
from ludic.envs.code_exec.unsafe_subprocess import UnsafeSubprocessPool
from ludic.errors import ConfigError


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
    backend's pool, such as its `config`; `memory_limit_mb` (256) is that of a program. ConfigError
    for an unknown name or setting, NoSandboxError, a RuntimeError, if the backend does not work.
    """
    if workspace_base_dir != "auto":
        raise ConfigError(
            f"workspace_base_dir ({workspace_base_dir!r}) must be 'auto': what programs write is in memory, of limited size"
        )
    chosen = parse_backend(backend)
    if chosen is SandboxBackend.AUTO:
        chosen = detect_available_backend()
    settings = {"n_workers": n_workers, "cache_size": cache_size, "max_concurrent_ops": max_concurrent_ops, **backend_kwargs}
    pool = _make_pool(chosen, python_version, settings)
    await pool.start()
    return pool


def _make_pool(backend: SandboxBackend, python_version: str | None, settings: dict[str, Any]) -> BaseSandboxPool:
    if backend is SandboxBackend.UNSAFE_SUBPROCESS:
        return UnsafeSubprocessPool(python_version=python_version, **settings)
    if backend is SandboxBackend.BUBBLEWRAP:
        if not is_bubblewrap_available():
            raise NoSandboxError(f"bubblewrap does not work here; it needs {REQUIRES[backend]}")
        config = settings.pop("config", None) or BubblewrapConfig(python_version, settings.pop("memory_limit_mb", 256))
        return BubblewrapSandboxPool(config=config, **settings)
    if backend is SandboxBackend.SINGULARITY:
        raise NotImplementedError("Singularity backend is not yet implemented; bubblewrap needs neither root nor a daemon")
    memory_mb = settings.pop("memory_limit_mb", 256)
    if backend is SandboxBackend.DOCKER:
        docker = DockerSandboxConfig(python_version or OWN_VERSION, memory_limit=f"{memory_mb}m")
        return DockerSandboxPool(**{"config": docker, "auto_replace_failed": True, **settings})
    podman = PodmanConfig(memory_limit=f"{memory_mb}m", command=backend.value)
    return PodmanHPCSandboxPool(**{"image": f"python:{python_version or OWN_VERSION}-slim", "config": podman, **settings})
