"""Processes of a run: starts, watches, restarts and ends them on this machine, on a Ray cluster, or
in a Slurm job.

A `Process` is a command line with resources. A `Place` runs processes, a `Supervisor` decides what
happens when one ends. Nothing here knows what the processes do: no sample and no weight passes
through.
"""
