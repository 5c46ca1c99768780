"""Calls of the command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "drain"))

from shardworld import World


def ckpt(*arguments: str, env: dict[str, str] | None = None, world: World | None = None):
    argv = [sys.executable, "-m", "slurm_resil", "ckpt", *arguments]
    if world is not None:
        argv += ["--run-dir", world.run_dir, "--job-dir", world.job_dir(0)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})})
