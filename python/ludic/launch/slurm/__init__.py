"""Slurm: the batch script of the processes of a run (`place=slurm`), and the script of a training
job with its servers (`ludic slurm`)."""

from ludic.launch.slurm.run import run_job
from ludic.launch.slurm.run_script import SlurmJob, assign_nodes, write_script
from ludic.launch.slurm.settings import SlurmSettings, batch_script
from ludic.launch.slurm.steps import Allocation, Placement, Server, place, server_steps, training_step

__all__ = [
    "Allocation",
    "Placement",
    "Server",
    "SlurmJob",
    "SlurmSettings",
    "assign_nodes",
    "batch_script",
    "place",
    "run_job",
    "server_steps",
    "training_step",
    "write_script",
]
