"""Rewards from programs that run: problems with tests, sandboxes, and the environment that judges.

A sandbox runs programs; a pool lends sandboxes; a runner judges a program by its tests; adapters
read data sets of problems; verifiers compare outputs.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from ludic.envs.code_exec.adapters.base import ExactMatchVerifier, OutputVerifier, TestAdapter
from ludic.envs.code_exec.adapters.problem import CodingProblemAdapter, read_problem
from ludic.envs.code_exec.backend import (
    SandboxBackend,
    UnsafeSubprocessPool,
    create_sandbox_pool,
    detect_available_backend,
    get_backend_info,
    is_docker_available,
    is_podman_available,
    is_podman_hpc_available,
    is_singularity_available,
)
from ludic.envs.code_exec.bubblewrap import BubblewrapConfig, BubblewrapSandboxPool, is_bubblewrap_available
from ludic.envs.code_exec.calls import FunctionCallRunner, ValueVerifier
from ludic.envs.code_exec.env import CodeExecConfig, CodeExecEnv
from ludic.envs.code_exec.podman_sandbox import PodmanConfig, PodmanError, PodmanHPCSandbox, PodmanHPCSandboxPool
from ludic.envs.code_exec.pool import LRUCache
from ludic.envs.code_exec.runners import CodeRunner, StdinStdoutRunner
from ludic.envs.code_exec.types import (
    BatchTestResult,
    CompileResult,
    CompileStatus,
    ExecutionResult,
    NoSandboxError,
    RunStatus,
    Sandbox,
    SandboxPool,
    TestCase,
    TestResult,
    compute_hash,
    hash_tests,
)

if TYPE_CHECKING or ((_docker := find_spec("docker")) is not None and _docker.origin is not None):
    from ludic.envs.code_exec.docker_sandbox import DockerSandbox, DockerSandboxConfig, DockerSandboxPool
else:  # documented: without the package, the names are None
    DockerSandbox = DockerSandboxConfig = DockerSandboxPool = None

__all__ = [
    "BatchTestResult",
    "BubblewrapConfig",
    "BubblewrapSandboxPool",
    "CodeExecConfig",
    "CodeExecEnv",
    "CodeRunner",
    "CodingProblemAdapter",
    "CompileResult",
    "CompileStatus",
    "DockerSandbox",
    "DockerSandboxConfig",
    "DockerSandboxPool",
    "ExactMatchVerifier",
    "ExecutionResult",
    "FunctionCallRunner",
    "LRUCache",
    "NoSandboxError",
    "OutputVerifier",
    "PodmanConfig",
    "PodmanError",
    "PodmanHPCSandbox",
    "PodmanHPCSandboxPool",
    "RunStatus",
    "Sandbox",
    "SandboxBackend",
    "SandboxPool",
    "StdinStdoutRunner",
    "TestAdapter",
    "TestCase",
    "TestResult",
    "UnsafeSubprocessPool",
    "ValueVerifier",
    "compute_hash",
    "create_sandbox_pool",
    "detect_available_backend",
    "get_backend_info",
    "hash_tests",
    "is_bubblewrap_available",
    "is_docker_available",
    "is_podman_available",
    "is_podman_hpc_available",
    "is_singularity_available",
    "read_problem",
]
