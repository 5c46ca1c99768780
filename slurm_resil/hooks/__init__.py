"""Prolog and epilog: root in slurmd, in a few hundredths of a second, without Slurm's commands."""
