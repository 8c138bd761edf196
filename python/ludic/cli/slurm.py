"""`ludic slurm`: a training job with servers beside it, as a batch script."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from ludic.errors import ConfigError, LaunchError
from ludic.files.atomic import write_text
from ludic.launch.slurm import Allocation, SlurmSettings, batch_script, place, server_steps, training_step
from ludic.launch.slurm.run import describe
from ludic.launch.slurm.settings import write_settings
from ludic.recipes.compose import compose, split_arguments
from ludic.recipes.inference_section import choose_kind
from ludic.recipes.schema import Recipe

TASKS = {"grpo": "grpo", "maxent": "maxent_grpo", "maxent-grpo": "maxent_grpo"}
"""`--task` -> algorithm."""
SUBMIT_S = 60.0
JOB_ID = "JOB"
"""What stands for the number of the job before it is submitted."""


def slurm_command(
    arguments: Sequence[str], *, task: str | None, submit: bool, setup: Sequence[str], options: dict[str, Any]
) -> int:
    """Print the script and the plan, or submit the job. `options` are fields of `SlurmSettings`."""
    arguments = [*arguments, *([f"algorithm={_find_algorithm(task)}"] if task is not None else [])]
    settings = make_settings(arguments, setup=setup, options=options)
    nodes = [f"node{number}" for number in range(settings.nodes)]
    placement = place(settings, Allocation(nodes, settings.gpus_per_node))
    commands = [*server_steps(settings, placement, JOB_ID), training_step(settings, placement, JOB_ID)]
    digest = hashlib.sha256(write_settings(settings).encode()).hexdigest()[:12]
    stem = Path(settings.logs) / f"{settings.job_name}-{digest}"
    text = batch_script(settings, settings_file=f"{stem}.json")
    if not submit:
        typer.echo(text)
        typer.echo("\n".join(f"# {line}" for line in describe(placement)))
        typer.echo("\n".join(f"# {shlex.join(command)}" for command in commands))
        typer.echo("# Nothing is submitted; add --submit")
        return 0
    Path(settings.logs).mkdir(parents=True, exist_ok=True)
    write_text(Path(f"{stem}.json"), write_settings(settings))
    write_text(Path(f"{stem}.sh"), text)
    typer.echo(f"Submitted job {_submit(Path(f'{stem}.sh'))}; logs are in {settings.logs}")
    return 0


def make_settings(arguments: Sequence[str], *, setup: Sequence[str], options: dict[str, Any]) -> SlurmSettings:
    """The job of a recipe and its settings. Raises ConfigError for a recipe that `ludic train`
    would refuse, so that it does not wait in the queue first."""
    recipe = compose(arguments)
    if recipe.place.on != "local" or recipe.place.actors or recipe.place.servers or recipe.place.trainers > 1:
        raise ConfigError("ludic slurm places the processes itself; leave place.* out, or use `ludic train place=slurm`")
    serve = choose_kind(recipe.inference) == "vllm" and recipe.inference.url is None
    name = options.get("job_name") or re.sub(r"[^A-Za-z0-9_.-]", "_", recipe.name or f"{recipe.recipe}-{recipe.algorithm}")
    given = {key: value for key, value in options.items() if value is not None}
    train, server = list(arguments), _make_server(recipe, given) if serve else []
    if serve:
        train = [*_without_server(train), "inference.kind=vllm"]
    return SlurmSettings(
        **{**given, "job_name": name}, train=("-m", "ludic.cli", "train", *train), serve=serve, server=server, setup=tuple(setup)
    )


def _make_server(recipe: Recipe, options: dict[str, Any]) -> tuple[str, ...]:
    section = recipe.inference
    if recipe.model is None:
        raise ConfigError("a server needs a model that is on disk or on the hub; set model=DIRECTORY, or inference=local")
    flags = [*(["--python", section.python] if section.python else []), "--device", section.device]
    flags += ["--weights", section.weights] if section.weights else []
    flags += ["--lora-rank", str(recipe.lora.rank)] if recipe.lora.rank else []
    own = ["--", *section.server_args] if section.server_args else []
    return ("-m", "ludic.cli", "serve", recipe.model, *flags, *own)


def _without_server(arguments: Sequence[str]) -> list[str]:
    """The arguments without those of a server that the run would start itself."""
    split_arguments(arguments)
    started = ("inference=", "inference.python=", "inference.server_args=", "inference.kind=")
    return [argument for argument in arguments if not argument.startswith(started)]


def _find_algorithm(task: str) -> str:
    if task not in TASKS:
        raise ConfigError(f"--task ({task}) must be one of {', '.join(TASKS)}; other algorithms are algorithm=NAME")
    return TASKS[task]


def _submit(script: Path) -> str:
    try:
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, timeout=SUBMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"sbatch could not be run ({error}); submit {script} on a machine of the cluster, from this folder"
        ) from error
    if done.returncode:
        raise LaunchError(f"sbatch refused {script}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
