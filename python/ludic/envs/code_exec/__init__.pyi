from ludic.envs.code_exec.adapters.base import (
    ExactMatchVerifier as ExactMatchVerifier,
    OutputVerifier as OutputVerifier,
    TestAdapter as TestAdapter,
)
from ludic.envs.code_exec.adapters.problem import CodingProblemAdapter as CodingProblemAdapter, read_problem as read_problem
from ludic.envs.code_exec.backend import (
    SandboxBackend as SandboxBackend,
    UnsafeSubprocessPool as UnsafeSubprocessPool,
    create_sandbox_pool as create_sandbox_pool,
    detect_available_backend as detect_available_backend,
    get_backend_info as get_backend_info,
    is_docker_available as is_docker_available,
    is_podman_available as is_podman_available,
    is_podman_hpc_available as is_podman_hpc_available,
    is_singularity_available as is_singularity_available,
)
from ludic.envs.code_exec.bubblewrap import (
    BubblewrapConfig as BubblewrapConfig,
    BubblewrapSandboxPool as BubblewrapSandboxPool,
    is_bubblewrap_available as is_bubblewrap_available,
)
from ludic.envs.code_exec.calls import FunctionCallRunner as FunctionCallRunner, ValueVerifier as ValueVerifier
from ludic.envs.code_exec.docker_sandbox import (
    DockerSandbox as DockerSandbox,
    DockerSandboxConfig as DockerSandboxConfig,
    DockerSandboxPool as DockerSandboxPool,
)
from ludic.envs.code_exec.env import CodeExecConfig as CodeExecConfig, CodeExecEnv as CodeExecEnv
from ludic.envs.code_exec.podman_sandbox import (
    PodmanConfig as PodmanConfig,
    PodmanError as PodmanError,
    PodmanHPCSandbox as PodmanHPCSandbox,
    PodmanHPCSandboxPool as PodmanHPCSandboxPool,
)
from ludic.envs.code_exec.pool import LRUCache as LRUCache
from ludic.envs.code_exec.runners import CodeRunner as CodeRunner, StdinStdoutRunner as StdinStdoutRunner
from ludic.envs.code_exec.types import (
    BatchTestResult as BatchTestResult,
    CompileResult as CompileResult,
    CompileStatus as CompileStatus,
    ExecutionResult as ExecutionResult,
    NoSandboxError as NoSandboxError,
    RunStatus as RunStatus,
    Sandbox as Sandbox,
    SandboxPool as SandboxPool,
    TestCase as TestCase,
    TestResult as TestResult,
    compute_hash as compute_hash,
    hash_tests as hash_tests,
)
