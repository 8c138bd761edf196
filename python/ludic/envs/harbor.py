"""Task folders in Harbor's format: their settings, and the sandbox of a task.

A folder has `task.toml`, `instruction.md`, `environment/` with a Dockerfile (unless `task.toml`
names an image), `tests/test.sh`, and perhaps `solution/solve.sh`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shlex
import shutil
import threading
import tomllib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from ludic.envs.code_exec.backend import is_program_ready
from ludic.envs.code_exec.bubblewrap import is_bubblewrap_available
from ludic.envs.code_exec.containers import START_S
from ludic.envs.code_exec.podman_sandbox import run_podman
from ludic.envs.workspaces.containers import ContainerWorkspace
from ludic.envs.workspaces.sandbox import READ_ONLY, BubblewrapRoot, Sandbox, find_copies
from ludic.envs.workspaces.workspace import Ended, run_program
from ludic.errors import ConfigError, check_value
from ludic.event_loop import run_to_completion
from ludic.user_objects import import_named

SANDBOXES = ("auto", "bubblewrap", "docker", "podman")
_CAPABILITIES = (
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SYS_CHROOT",
    "NET_BIND_SERVICE",
)
"""Of root in a task's container: what the installation of packages needs. Some images let no other
root write into `/`, such as Podman's without an entry for it."""
_TIMEOUT_S = 600.0
_USED = {
    "agent": {"timeout_sec"},
    "verifier": {"timeout_sec", "env", "environment_mode", "environment"},
    "solution": {"env"},
    "environment": {
        *("build_timeout_sec", "docker_image", "cpus", "memory_mb", "memory", "gpus", "allow_internet", "network_mode"),
        *("env", "workdir", "mcp_servers", "os"),
    },
}
_DESCRIBING = {"version", "schema_version", "source", "task", "metadata", "environment.storage_mb", "environment.storage"}
"""Keys that are read by people, or that no sandbox of ours enforces."""


@dataclass(frozen=True)
class HarborTask:
    """What a task folder says."""

    folder: Path
    instruction: str
    agent_timeout_s: float
    verifier_timeout_s: float
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    """An image that exists; None: it is built from `environment/Dockerfile`."""
    workdir: str | None = None
    """Where commands run; None: the image says."""
    build_timeout_s: float = _TIMEOUT_S
    cpus: float | None = None
    memory_mb: int | None = None
    allows_network: bool = True

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def environment(self) -> Path:
        return self.folder / "environment"


def read_task(folder: Path, *, secrets: Collection[str] = (), told: set[str] | None = None) -> HarborTask:
    """Read a task folder. `secrets`: variables of this process that it may have. Keys that have no
    effect are added to `told`. Raises ConfigError, which names the task, for files that are
    missing, and for settings that are not supported."""
    try:
        tree = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the task {folder} cannot be read: {error}") from error
    sections = {name: tree.get(name, {}) for name in _USED}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise ConfigError(f"the task {folder}: {name} ({section!r}) must be a table, [{name}]")
    _check_supported(folder, tree, **sections)
    if told is not None:
        told |= set(_list_unused(tree, sections))
    where, environment = f"the task {folder}: ", sections["environment"]
    seconds = {
        section: sections[section].get(name, _TIMEOUT_S)
        for section, name in {"agent": "timeout_sec", "verifier": "timeout_sec", "environment": "build_timeout_sec"}.items()
    }
    for section, value in seconds.items():
        check_value(f"{where}{section}: the deadline", value, "seconds", above=0, below=inf)
    for name in ("docker_image", "workdir"):
        if not isinstance(environment.get(name), str | None):
            raise ConfigError(f"{where}environment.{name} ({environment[name]!r}) must be text")
    for name in ("cpus", "memory_mb"):
        check_value(f"{where}environment.{name}", environment.get(name), above=0, below=inf, optional=True)
    variables = {
        name: _read_variables(f"{where}{name}.env", sections[name].get("env", {}), secrets)
        for name in ("environment", "verifier", "solution")
    }
    return HarborTask(
        folder,
        instruction,
        seconds["agent"],
        seconds["verifier"],
        variables["verifier"],
        solution_env=variables["solution"],
        env=variables["environment"],
        image=environment.get("docker_image"),
        workdir=environment.get("workdir"),
        build_timeout_s=seconds["environment"],
        cpus=environment.get("cpus"),
        memory_mb=environment.get("memory_mb") or _read_size(where, environment.get("memory")),
        allows_network=environment.get("network_mode", "public") == "public" and environment.get("allow_internet", True) is True,
    )


def _check_supported(
    folder: Path, tree: Mapping[str, Any], *, environment: Mapping[str, Any], verifier: Mapping[str, Any], **_: Any
) -> None:
    compose = [path.name for path in (folder / "environment").glob("*compose*.y*ml")]
    refused = {
        "verifier.environment_mode = separate": verifier.get("environment_mode") == "separate" or verifier.get("environment"),
        f"environment.gpus = {environment.get('gpus')}": environment.get("gpus"),
        "environment.mcp_servers": environment.get("mcp_servers"),
        f"environment.os = {environment.get('os')}": environment.get("os", "linux") != "linux",
        "steps": tree.get("steps"),
        f"environment/{compose[0] if compose else ''}": compose,
    }
    if found := [name for name, value in refused.items() if value]:
        raise ConfigError(f"the task {folder} has {found[0]}, which is not supported; leave the task out")
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"the task {folder} has no tests/test.sh; write one, which writes the reward")
    if not (environment.get("docker_image") or (folder / "environment" / "Dockerfile").is_file()):
        raise ConfigError(f"the task {folder} has no environment/Dockerfile and no environment.docker_image; write one of them")


def _list_unused(tree: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The keys with a value that nothing here reads."""
    named = {name: value for name, value in tree.items() if name not in sections}
    for section, values in sections.items():
        named |= {f"{section}.{name}": value for name, value in values.items() if name not in _USED[section]}
    return [name for name, value in named.items() if value and name not in _DESCRIBING]


_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def _read_variables(where: str, given: Any, secrets: Collection[str]) -> dict[str, str]:
    """The variables, with `${NAME}` and `${NAME:-default}` filled in."""
    if not isinstance(given, dict):
        raise ConfigError(f"{where} ({given!r}) must be a table of variables")

    def fill(match: re.Match[str]) -> str:
        if match[1] in secrets and match[1] in os.environ:
            return os.environ[match[1]]
        if match[2] is None:
            raise ConfigError(f"{where} wants {match[1]} of this machine; export it, and set task.args.secrets=[{match[1]}]")
        return match[2]

    return {name: _VARIABLE.sub(fill, str(value)) for name, value in given.items()}


def _read_size(where: str, size: Any) -> int | None:
    """Megabytes of the older `memory = "2G"`."""
    if size is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG])", str(size).strip().upper())
    if match is None:
        raise ConfigError(f"{where}environment.memory ({size!r}) must be a size such as 2G or 512M")
    return max(1, int(float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[match[2]]))


MakeSandbox = Callable[[HarborTask], Sandbox]


def choose_sandbox(task: HarborTask, kind: str, *, network: bool = False, mounts: Sequence[str] = ()) -> Callable[[], Sandbox]:
    """What makes the sandboxes of a task: `docker`, `podman`, `bubblewrap`, or `module:name` of
    your own, called with the task. `auto` is Docker, else Podman, else bubblewrap. `network`:
    containers have one if the task allows it. `mounts`: folders that are shown, too. Raises
    ConfigError, which names the task, for one that cannot be used."""
    if ":" in kind:
        make: MakeSandbox = import_named(kind, "task.args.sandbox")
        return lambda: make(task)
    check_value("task.args.sandbox", kind, "or module:name of your own", choices=SANDBOXES)
    program = kind if kind != "auto" else next(filter(_is_ready, ("docker", "podman")), "bubblewrap")
    if not _is_ready(program):
        needed = "Docker, Podman or bubblewrap" if kind == "auto" else program
        raise ConfigError(f"task.args.sandbox ({kind}) needs {needed}, which is not installed or may not be used here")
    if program != "bubblewrap":
        return lambda: TaskContainer(program, task, network=network and task.allows_network, mounts=mounts)
    copies, folder, variables = plan_root(task)
    return lambda: BubblewrapRoot(copies, folder=folder, env={**variables, **task.env}, mounts=mounts)


def _is_ready(program: str) -> bool:
    return _try_program(program, shutil.which("bwrap" if program == "bubblewrap" else program))


@cache
def _try_program(program: str, path: str | None) -> bool:
    """Whether the program at `path` works here. Many tasks ask, and a trial starts a process."""
    return path is not None and (is_bubblewrap_available() if program == "bubblewrap" else is_program_ready(program))


def plan_root(task: HarborTask) -> tuple[list[tuple[Path, str]], str, dict[str, str]]:
    """What bubblewrap makes of a task's Dockerfile: the copies, the working directory, and the
    variables. Raises ConfigError for an instruction other than FROM, WORKDIR, COPY and ENV."""
    needed = f"the task {task.folder} needs Docker or Podman: bubblewrap cannot do"
    path = task.environment / "Dockerfile"
    if not path.is_file():
        raise ConfigError(f"{needed} without a Dockerfile, but with the image {task.image}")
    copies: list[tuple[Path, str]] = []
    variables: dict[str, str] = {}
    folder, stages = "/", 0
    for line in _read_instructions(path.read_text(encoding="utf-8")):
        word, _, rest = line.partition(" ")
        instruction, parts = word.upper(), shlex.split(rest)
        stages += instruction == "FROM"
        is_plain = "$" not in rest and not rest.lstrip().startswith(("--", "[", "<<"))
        if instruction not in ("FROM", "WORKDIR", "COPY", "ENV") or stages > 1 or not (is_plain or instruction == "FROM"):
            raise ConfigError(f"{needed} `{line[:80]}`")
        if instruction == "WORKDIR":
            folder = _join(folder, rest.strip())
        elif instruction == "COPY" and len(parts) > 1:
            copies += find_copies(task.environment, parts[:-1], _join(folder, parts[-1]))
        elif instruction == "ENV":
            pairs = [part.split("=", 1) for part in parts] if "=" in parts[0] else [[parts[0], " ".join(parts[1:])]]
            variables |= {pair[0]: pair[-1] for pair in pairs}
    folder = task.workdir or folder
    for place in (folder, *(target for _, target in copies)):
        if place.lstrip("/").split("/")[0] in READ_ONLY or ".." in place:
            raise ConfigError(f"{needed} {place}, which is read alone there")
    return copies, folder, variables


def _read_instructions(text: str) -> list[str]:
    """The instructions of a Dockerfile, each on one line."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [line.strip() for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def _join(folder: str, path: str) -> str:
    """`path`, which may be relative to `folder`; the slash at its end stays."""
    joined = os.path.normpath(os.path.join(folder, path))
    return joined + ("/" if path.endswith("/") and joined != "/" else "")


class TaskContainer(ContainerWorkspace):
    """A container of a task's image, which is built once for each content of `environment/`."""

    def __init__(self, program: str, task: HarborTask, *, network: bool, mounts: Sequence[str] = ()) -> None:
        limits = {"--cpus": task.cpus, "--memory": None if task.memory_mb is None else f"{task.memory_mb}m"}
        arguments = [part for name, value in limits.items() if value is not None for part in (name, str(value))]
        arguments += [f"--cap-add={name}" for name in _CAPABILITIES]
        image = task.image or f"localhost/ludic-task:{hash_folder(task.environment)[:24]}"
        super().__init__(program, image, mounts=mounts, arguments=arguments, network="bridge" if network else "none")
        self._task = task

    async def exec(self, argv: Sequence[str], variables: Mapping[str, str]) -> Ended:
        return await super().exec(argv, {**self._task.env, **variables})

    async def _have_image(self) -> None:
        if self._task.image is None:
            await run_to_completion(asyncio.to_thread(self._build))
        else:
            await super()._have_image()
        shown = await run_program([self._program, "image", "inspect", "--format", "{{.Config.WorkingDir}}", "--", self._image])
        self.folder = self._task.workdir or shown.stdout.strip() or "/"

    def _build(self) -> None:
        with _BUILDING[self._image]:
            known = run_podman([self._program, "image", "inspect", "--", self._image], timeout_s=START_S)
            if known.returncode:
                argv = [self._program, "build", "--quiet", "--tag", self._image, str(self._task.environment)]
                failure = f"the image of the task {self._task.folder} could not be built"
                run_podman(argv, timeout_s=self._task.build_timeout_s, failure=failure)


_BUILDING: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
"""Each image is built once, by the first episode that needs it; others beside it."""


def hash_folder(folder: Path) -> str:
    """A digest of the names, rights and contents of all files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        is_file = path.is_file()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
        rights = path.stat().st_mode & 0o777 if is_file else 0
        digest.update(f"{path.relative_to(folder)}\0{rights}\0{content}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()
