"""A private, real Slurm cluster in one directory of this host, with faults on demand."""

from slurm_resil.sandbox.api import Sandbox
from slurm_resil.sandbox.spec import SandboxSpec

__all__ = ["Sandbox", "SandboxSpec"]
