"""The batch script of a training job: text in, text out."""

from __future__ import annotations

import shlex

from ludic.launch.slurm.settings import CACHES, SlurmSettings


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
    parts = [_header(settings), "set -euo pipefail", *exports, *settings.setup, command]
    return "\n".join(parts) + "\n"


def _header(settings: SlurmSettings) -> str:
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
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), ""])


def _export(name: str, value: str) -> str:
    """A value of `CACHES`, or one that begins with `./`, below the folder of submission; any other
    as it is: `Qwen/Qwen2.5-7B` is not a path."""
    is_cache = CACHES.get(name) == value and "/" in value
    if is_cache or value.startswith("./"):
        return f'"$PWD"/{shlex.quote(value.removeprefix("./"))}'
    return shlex.quote(value)
