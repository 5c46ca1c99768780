"""What a training script uses: a Checkpointer."""

from slurm_resil.session.checkpointer import Checkpointer as Checkpointer
