"""Slurm's commands, as one runner with typed errors."""
