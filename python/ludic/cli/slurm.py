"""`ludic slurm`: a training job and its servers, as a batch script."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from ludic.cli.settings import add_named_recipe
from ludic.errors import ConfigError, LaunchError, check_value
from ludic.files.atomic import write_text
from ludic.launch.slurm import Allocation, Placement, SlurmSettings, batch_script, place, server_steps, training_step
from ludic.launch.slurm.run import describe
from ludic.launch.slurm.settings import write_settings
from ludic.launch.slurm.steps import tell_servers
from ludic.recipes.actors import check_actors
from ludic.recipes.compose import compose
from ludic.recipes.processes import check_url, choose_kind, choose_logprob_convention
from ludic.recipes.schema import Recipe
from ludic.runs.directory import RunDirectory
from ludic.runs.resume import parse_changes

ACCELERATORS = {"ddp": "none", "fsdp": "full", "zero2": "full", "zero3": "full"}
"""`--accelerator` -> `sharding.kind`."""
TASKS = {"grpo": "grpo", "maxent": "maxent_grpo", "maxent-grpo": "maxent_grpo", "infoseed": "grpo", "info-seed": "grpo"}
"""`--task` -> algorithm."""
SEEDED_TASKS = ("infoseed", "info-seed")
SUBMIT_S = 60.0
JOB_ID = "JOB"
"""What stands for the number of the job before it is submitted."""


def slurm_command(
    arguments: Sequence[str],
    *,
    task: str | None,
    accelerator: str | None,
    resume: Path | None,
    submit: bool,
    setup: Sequence[str],
    options: dict[str, Any],
) -> int:
    """Print the script and the plan, or submit the job. `options` are fields of `SlurmSettings`."""
    arguments = list(add_named_recipe(arguments, resume))
    if task is not None:
        check_value("--task", task, "other algorithms are algorithm=NAME", choices=TASKS)
        arguments.append(f"algorithm={TASKS[task]}")
    if accelerator is not None:
        check_value("--accelerator", accelerator, "or set sharding.kind", choices=ACCELERATORS)
        arguments.append(f"sharding.kind={ACCELERATORS[accelerator]}")
    if task in SEEDED_TASKS and resume is None and not compose(arguments, ranks=0).info_seed.num_seeds:
        raise ConfigError(f"--task {task} needs seeds; set info_seed.num_seeds=N (in a flat file info_seed_enabled: true)")
    settings, recipe = make_settings(arguments, resume=resume, setup=setup, options=options)
    placement = _place(settings)
    commands = [*server_steps(settings, placement, JOB_ID), training_step(settings, placement, JOB_ID)]
    digest = hashlib.sha256(write_settings(settings).encode()).hexdigest()[:12]
    stem = Path(settings.logs) / f"{settings.job_name}-{digest}"
    text = batch_script(settings, settings_file=f"{stem}.json")
    if not submit:
        typer.echo(text)
        typer.echo("\n".join(f"# {line}" for line in describe(placement)))
        typer.echo(
            f"# a step: {recipe.rollout.prompts} problems x {recipe.rollout.group_size + recipe.info_seed.num_seeds} answers"
        )
        typer.echo("\n".join(f"# {shlex.join(command)}" for command in commands))
        if settings.ports_of_job:
            typer.echo("# A job has ports of its own, by its number, in place of these")
        typer.echo("# Nothing is submitted; add --submit")
        return 0
    Path(settings.logs).mkdir(parents=True, exist_ok=True)
    write_text(Path(f"{stem}.json"), write_settings(settings), private=True)
    write_text(Path(f"{stem}.sh"), text, private=True)
    typer.echo(f"Submitted job {_submit(Path(f'{stem}.sh'))}; logs are in {settings.logs}")
    return 0


def make_settings(
    arguments: Sequence[str], *, resume: Path | None, setup: Sequence[str], options: dict[str, Any]
) -> tuple[SlurmSettings, Recipe]:
    """The job of a recipe, or of a run to resume, and its recipe there. Raises ConfigError for what
    `ludic train` would refuse, so that it does not wait in the queue first."""
    source, replaced, command = [], [], ["-m", "ludic.cli", "train"]
    if resume is not None:
        if (more := parse_changes(arguments, "train").more_steps) is not None:
            raise ConfigError(f"steps=+{more} would be added again whenever the job starts again; set steps=N, for N in all")
        source, command = [str(RunDirectory.open_to_read(resume).config)], [*command, "--resume", str(resume)]
        # Its servers ended with their job; those that the command line names stay.
        if not any(argument.startswith("inference.url=") for argument in arguments):
            replaced = [f"inference.kind={choose_kind(compose(source).inference)}", "inference.url=null"]
    recipe = compose([*source, *arguments, *replaced], ranks=0)
    if recipe.place.on != "local" or recipe.place.actors or recipe.place.servers or recipe.place.trainers > 1:
        raise ConfigError("ludic slurm places the processes itself; leave place.* out, or use `ludic train place=slurm`")
    if recipe.queue.url is not None:
        check_url(recipe.queue.url)
    given = {key: value for key, value in options.items() if value is not None}
    given["ports_of_job"] = not any(name.endswith("_port") for name in given)
    run = recipe.name or f"{recipe.recipe}-{recipe.algorithm}"
    given["job_name"] = given.get("job_name") or re.sub(r"[^A-Za-z0-9_.-]", "_", run)
    serve = choose_kind(recipe.inference) == "vllm" and recipe.inference.url is None
    if not serve and (given.get("data_parallel", 1), given.get("tensor_parallel", 1)) != (1, 1):
        raise ConfigError("--dp and --tp need servers; set inference=vllm (use_vllm: true in a flat file)")
    train, server = list(arguments), _make_server(recipe) if serve else ()
    if serve:  # settings of a server that the run would start itself belong to the servers now
        train += [*(["inference.kind=vllm"] if resume is None else []), "inference.python=null", "inference.server_args=[]"]
    settings = SlurmSettings(**{**given, "train": (*command, *train), "serve": serve, "server": server, "setup": tuple(setup)})
    placement = _place(settings)
    ranks = len(placement.train_nodes) * placement.ranks_per_node
    recipe = compose([*source, *train, *tell_servers(settings.train, placement)], ranks=ranks)
    check_actors(recipe)
    return settings, recipe


def _place(settings: SlurmSettings) -> Placement:
    """The plan on nodes with made-up names."""
    return place(settings, Allocation([f"node{number}" for number in range(settings.nodes)], settings.gpus_per_node))


def _make_server(recipe: Recipe) -> tuple[str, ...]:
    section = recipe.inference
    model = os.environ.get("VLLM_MODEL") or recipe.model
    if model is None:
        raise ConfigError("a server needs a model that is on disk or on the hub; set model=DIRECTORY, or inference=local")
    convention = choose_logprob_convention(recipe.rollout)
    flags = ["--logprobs-mode", "processed_logprobs" if convention.processed else "raw_logprobs"]
    flags += [*(["--python", section.python] if section.python else []), "--device", section.device]
    flags += ["--weights", section.weights] if section.weights else []
    flags += ["--lora-rank", str(recipe.lora.rank)] if recipe.lora.rank and recipe.lora.publish != "merged" else []
    own = ["--", *section.server_args] if section.server_args else []
    return ("-m", "ludic.cli", "serve", model, *flags, *own)


def _submit(script: Path) -> str:
    try:
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, timeout=SUBMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"sbatch could not be run ({error}); submit {script} on the cluster, from this folder") from error
    if done.returncode:
        raise LaunchError(f"sbatch refused {script}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
