"""The settings of a training job with servers, their file, and the batch script of the job."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ludic.errors import ConfigError, check_value
from ludic.launch.process import VARIABLE, check_name

_WORD = re.compile(r"[A-Za-z0-9_.,:=@%/+-]+")
_SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|PASSWORD|API_?KEY", re.IGNORECASE)
"""In the name of a variable; TOKENIZERS_PARALLELISM is none."""
_ASSIGNMENT = re.compile(r"(?:^|[\s;&|({])([A-Za-z_]\w*)=(?![\s;&|]|$|\"?\$(?:\(|\w+\"?(?:[\s;&|]|$)|\{\w+\}\"?(?:[\s;&|]|$)))")
"""`NAME=` before a value that a script shows: not nothing, `$OTHER`, `${OTHER}` or `$(command)`."""
_ADDRESS = re.compile(r"://[^/\s@]*:[^$\s/@][^\s/@]*@")
"""Of a server, with a password: redis://user:word@host."""

CACHES: Mapping[str, str] = {
    "HF_HOME": "var/cache/huggingface",
    "XDG_CACHE_HOME": "var/cache",
    "PIP_CACHE_DIR": "var/cache/pip",
    "TORCHINDUCTOR_CACHE_DIR": "var/cache/torchinductor",
    "TRITON_CACHE_DIR": "var/cache/triton",
    "WANDB_DIR": "var/wandb",
    "PYTHONNOUSERSITE": "1",
}
"""The environment of a job that sets none: caches below the folder of submission."""


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """What a job runs, on which nodes, and where its servers are.

    >>> SlurmSettings(train=("-m", "ludic.cli", "train", "maxent"), serve=False, nodes=2)
    """

    train: Sequence[str]
    """The arguments of the interpreter, for every rank that trains."""
    nodes: int = 1
    gpus_per_node: int = 8
    cpus_per_task: int = 8
    """Cores of the job on each node, which its steps share."""
    time: str = "24:00:00"
    """The time limit."""
    job_name: str = "ludic"
    partition: str | None = None
    account: str | None = None
    exclusive: bool = False
    """No other job on the nodes."""
    setup: Sequence[str] = ()
    """Lines of the script before training, such as `module load cuda` and `source env/activate`."""
    environment: Mapping[str, str] | None = None
    """Variables of the job, in addition to the variables of the shell that submits it; a value that
    begins with `./` is a path below the folder of submission. None means `CACHES`."""
    logs: str = "var/artifacts/logs"
    """The folder of the logs, which must exist when the job is submitted."""
    serve: bool = True
    """Start servers that sample, and tell the trainer their addresses."""
    server: Sequence[str] = ()
    """The arguments of the interpreter for a server. It also gets `--host`, `--port`, and after
    `--` `--tensor-parallel-size`. Empty: `ludic serve` with the `model=` of `train`, which returns
    processed log-probabilities: with `rollout.top_p` below 1 it needs `--logprobs-mode`."""
    data_parallel: int = 1
    """Servers."""
    tensor_parallel: int = 1
    """GPUs of each server."""
    server_port: int = 29525
    """Port of the first server; the others have the next ones."""
    group_port: int = 29535
    """Kept free for launchers that give the exchange of weights a port; ours chooses one itself."""
    master_port: int = 6000
    """Port at which the agents of the ranks meet."""
    ports_of_job: bool = False
    """Choose `server_port`, `group_port` and `master_port` by the number of the job, so that jobs
    on one machine have different ones."""
    health_timeout_s: float = 720.0
    """How long all servers together may take to be healthy."""
    stop_before_end_s: int = 120
    """How long before the time limit the trainer is asked to save and end."""
    python: str = ".venv/bin/python"
    """The interpreter on the nodes."""

    def __post_init__(self) -> None:
        for name in ("nodes", "cpus_per_task", "data_parallel", "tensor_parallel", "stop_before_end_s"):
            check_value(name, getattr(self, name), whole=True, least=1)
        check_value("gpus_per_node", self.gpus_per_node, whole=True, least=0)
        check_value("health_timeout_s", self.health_timeout_s, above=0)
        for name in ("server_port", "group_port", "master_port"):
            check_value(name, getattr(self, name), least=1024, most=65535)
        check_value("server_port of the last server", self._last_port, most=65535)
        for name in ("train", "server", "setup"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(part, str) and "\0" not in part for part in value):
                raise ConfigError(f"{name} ({value!r}) must be a list of texts")
        if not self.train:
            raise ConfigError("train is empty; give the arguments of the interpreter, such as -m ludic.cli train maxent")
        for name, port in (("group_port", self.group_port), ("master_port", self.master_port)):
            if self.server_port <= port <= self._last_port:
                raise ConfigError(f"{name} ({port}) is a port of the servers ({self.server_port} to {self._last_port})")
        check_time(self.time)
        check_name("job_name", self.job_name)
        for name in ("partition", "account", "logs"):
            value = getattr(self, name)
            if value is not None and not _WORD.fullmatch(value):
                raise ConfigError(f"{name} ({value!r}) must be one word of letters, digits and ./_-,:=@+")
        for name, lines in (("setup", self.setup), ("python", [self.python])):
            if any("\n" in line for line in lines):
                raise ConfigError(f"{name} ({list(lines)}) must have one line of the script in each text")
        if not self.python:
            raise ConfigError(f"python ({self.python!r}) must be the path of an interpreter")
        self._check_secrets()

    @property
    def _last_port(self) -> int:
        return self.server_port + self.data_parallel - 1

    def with_ports_of(self, job_id: str) -> SlurmSettings:
        """The settings with the ports of this job, if they are to be chosen. Jobs of up to 18
        servers whose numbers are less than 1,000 apart share none; job 77 has 11540 to 11559."""
        if not self.ports_of_job:
            return self
        first = 10_000 + int(job_id) % 1000 * 20
        return replace(self, master_port=first, group_port=first + 1, server_port=first + 2, ports_of_job=False)

    def _check_secrets(self) -> None:
        """Raise ConfigError for what would be readable in the script, and for variables that cannot
        be written into it."""
        for name, value in (self.environment or {}).items():
            if not VARIABLE.fullmatch(name) or "\0" in value or "\n" in value:
                raise ConfigError(f"environment: {name}={value!r} cannot be written into a script; use letters, digits and `_`")
            if _SECRET.search(name) or _ADDRESS.search(value):
                raise ConfigError(f"environment: {name} would be readable in the script; export it where you submit the job")
        for number, line in enumerate(self.setup, 1):
            names = [name for name in _ASSIGNMENT.findall(line) if _SECRET.search(name)]
            if names or _ADDRESS.search(line):
                what = names[0] if names else "a password in an address"
                raise ConfigError(f"setup, line {number}: {what} would be readable in the script; export it before you submit")


def check_time(limit: str) -> None:
    """Raise ConfigError for text that is no time limit."""
    if not re.fullmatch(r"\d+(-\d+(:\d+){0,2})?|\d+:\d+(:\d+)?", limit):
        raise ConfigError(f"time ({limit}) must be a time limit of Slurm: minutes, HH:MM:SS or days-HH")


def write_settings(settings: SlurmSettings) -> str:
    """The settings as JSON."""
    return json.dumps(asdict(settings), indent=1, sort_keys=True) + "\n"


def read_settings(path: Path) -> SlurmSettings:
    """The settings in a file of `write_settings`. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"settings of the job ({path}) cannot be read: {error}") from error
    known = {item.name for item in fields(SlurmSettings)}
    if not isinstance(content, dict) or not set(content) <= known or "train" not in content:
        raise ConfigError(f"{path} must have the settings of a job: train, and any of {', '.join(sorted(known - {'train'}))}")
    return SlurmSettings(**content)


def batch_script(settings: SlurmSettings, *, settings_file: str) -> str:
    """The text of the script. It is submitted from the folder that relative paths mean.
    `settings_file` is where the job finds these settings (`write_settings`).

    The job has the environment of the shell that submits it, such as `HF_TOKEN`. SIGTERM reaches
    the batch process alone, `stop_before_end_s` before the time limit, so that servers outlive the
    trainer's last step.
    """
    environment = CACHES if settings.environment is None else settings.environment
    exports = [f"export {name}={_export(name, value)}" for name, value in environment.items()]
    command = f"exec {shlex.quote(settings.python)} -m ludic.launch.slurm.job {shlex.quote(settings_file)}"
    options = [
        f"--job-name={settings.job_name}",
        f"--nodes={settings.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={settings.cpus_per_task}",
        *([f"--gres=gpu:{settings.gpus_per_node}"] if settings.gpus_per_node else []),
        f"--time={settings.time}",
        *([f"--partition={settings.partition}"] if settings.partition else []),
        *([f"--account={settings.account}"] if settings.account else []),
        *(["--exclusive"] if settings.exclusive else []),
        "--export=ALL",
        f"--signal=B:TERM@{settings.stop_before_end_s}",
        f"--output={settings.logs}/%x-%j.out",
        f"--error={settings.logs}/%x-%j.err",
    ]
    header = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "", "set -euo pipefail"]
    return "\n".join([*header, *exports, *settings.setup, command, ""])


def _export(name: str, value: str) -> str:
    """A value of `CACHES`, or one that begins with `./`, below the folder of submission; any other
    as it is: `Qwen/Qwen2.5-7B` is not a path."""
    is_cache = CACHES.get(name) == value and "/" in value
    if is_cache or value.startswith("./"):
        return f'"$PWD"/{shlex.quote(value.removeprefix("./"))}'
    return shlex.quote(value)
