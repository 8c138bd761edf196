"""Slurm: the batch script of the processes of a run (`place=slurm`), and the script of a training
job with its servers (`ludic slurm`)."""

from ludic.launch.slurm.run import run_job as run_job
from ludic.launch.slurm.run_script import SlurmJob as SlurmJob, assign_nodes as assign_nodes, write_script as write_script
from ludic.launch.slurm.settings import SlurmSettings as SlurmSettings, batch_script as batch_script
from ludic.launch.slurm.steps import (
    Allocation as Allocation,
    Placement as Placement,
    Server as Server,
    place as place,
    server_steps as server_steps,
    training_step as training_step,
)
