"""``python -m slurm_resil`` is ``slurm-resil``."""

from slurm_resil.cli.main import main

main()
