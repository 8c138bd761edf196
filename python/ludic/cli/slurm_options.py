"""The options of `ludic slurm`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludic.cli.user_errors import report_user_errors

HELP = """Train in a Slurm job, with vLLM servers beside the trainer if the recipe samples from vLLM.

On one node the servers have its first GPUs and training the others; on several, the servers have the last nodes, as few as
hold them. Every GPU that trains has a rank. Prints the batch script and the plan, or submits the job from the current folder,
which all nodes must see.

**Examples**

- `ludic slurm sort --gpus-per-node 0` prints the script of a job on one node without GPUs
- `ludic slurm maths.yaml --nodes 3 --dp 2 --tp 2 --time 12:00:00 --partition gpu --submit` trains on two nodes and serves on the
third, with two servers of two GPUs
- `ludic slurm --resume runs/NAME --nodes 3 --submit` resumes a run in a new job
- `ludic slurm maths.yaml --task maxent --setup 'module load cuda' --setup 'source env/bin/activate'`
"""

_OF_THE_COMMAND = ("arguments", "task", "accelerator", "resume", "submit", "setup")
"""Options that are not fields of `SlurmSettings`."""


def slurm(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="As those of `ludic train`.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="grpo or maxent: short for algorithm=NAME. infoseed: grpo with seeds.")] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="ddp; or fsdp, zero2, zero3: sharding.kind=full, which shares out weights and optimizer.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Folder of the run to resume, with servers of the new job.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0)] = 8,
    cpus_per_task: Annotated[int, typer.Option(min=1, help="Cores of the job on each node.")] = 8,
    data_parallel: Annotated[int, typer.Option("--dp", min=1, help="Servers.")] = 1,
    tensor_parallel: Annotated[int, typer.Option("--tp", min=1, help="GPUs of each server.")] = 1,
    time: Annotated[str, typer.Option(help="Time limit; the run is saved before it.")] = "24:00:00",
    job_name: Annotated[str | None, typer.Option(help="Default: that of the run.")] = None,
    partition: Annotated[str | None, typer.Option()] = None,
    account: Annotated[str | None, typer.Option()] = None,
    exclusive: Annotated[bool, typer.Option(help="No other job on the nodes.")] = False,
    setup: Annotated[list[str] | None, typer.Option(help="A line of the script before training; may be repeated.")] = None,
    logs: Annotated[str, typer.Option(help="Folder of the logs.")] = "var/artifacts/logs",
    python: Annotated[str, typer.Option(help="The interpreter on the nodes.")] = ".venv/bin/python",
    server_port: Annotated[
        int | None, typer.Option("--server-port", "--vllm-port", help="Port of the first server. Default: by the job's number.")
    ] = None,
    group_port: Annotated[int | None, typer.Option("--group-port", "--vllm-group-port", help="Kept free.")] = None,
    master_port: Annotated[
        int | None, typer.Option(help="Port at which the ranks meet. Default: by the job's number, if no port is set.")
    ] = None,
    submit: Annotated[bool, typer.Option(help="Submit the job instead of printing it.")] = False,
) -> None:
    options = {name: value for name, value in locals().items() if name not in _OF_THE_COMMAND}
    with report_user_errors():
        from ludic.cli.slurm import slurm_command

        code = slurm_command(
            arguments or (), task=task, accelerator=accelerator, resume=resume, submit=submit, setup=setup or (), options=options
        )
    raise typer.Exit(code)
