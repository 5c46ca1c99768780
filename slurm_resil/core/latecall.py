"""How a late drain is called on a node, by the epilog and in a job. Imports nothing that costs time."""

from __future__ import annotations

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def command(job_dir: str, limit_s: int) -> list[str]:
    """Command line of the process that makes durable what is in a job's directory, and then empties it.

    Args:
        job_dir: The directory.
        limit_s: Longest time that it takes, seconds.
    """
    # first, so that it is this very package, whatever else the interpreter has
    code = f"import sys; sys.path.insert(0, {_ROOT!r}); from slurm_resil.cli.main import main; main()"
    argv = [sys.executable, "-I", "-c", code, "mover", "late", "--job-dir", job_dir, "--limit", str(limit_s)]
    return [*argv, "--clear", "--json"]


def environment(**more: str) -> dict[str, str]:
    """Its whole environment."""
    alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/", **alone, **more}
