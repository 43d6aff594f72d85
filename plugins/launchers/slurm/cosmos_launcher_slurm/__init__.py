"""Runs on a Slurm cluster: one heterogeneous job, whose controller starts each replica as a step."""
