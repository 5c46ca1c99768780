"""Phases of an attempt."""

from __future__ import annotations

import enum


class Phase(enum.StrEnum):
    """Where the attempt is, see :mod:`slurm_resil.launch.policy`."""

    RUNNING = "running"
    STOPPING = "stopping"
    FINISHING = "finishing"
    CONTINUING = "continuing"
    WAITING = "waiting"
    DONE = "done"
