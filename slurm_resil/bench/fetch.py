"""What it takes until nodes have a drained file: each reads all of it by itself, or it is fetched and read from there.

The movers stand for nodes of their own, so those that read by themselves read past the page cache, which they would not
share, and the file is dropped from it before each fetch. Both compare every block with its hash. A file system that
lies in memory cannot be read past anything, and one that is faster than this host's memory for all nodes is no parallel
one: there a rate says what such a one would give to all nodes together.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from slurm_resil.bench.launch import mpiexec
from slurm_resil.bench.redundancy import RUN, make
from slurm_resil.bench.redundancy_rank import ITERATION
from slurm_resil.comm import local
from slurm_resil.core import paths
from slurm_resil.core.errors import ConfigError, ResilError
from slurm_resil.drain import collective
from slurm_resil.drain.skeleton import skeleton

JOB = 1


@contextlib.contextmanager
def _drained(pfs: str | None, bb: str | None, size_bytes: int, nodes: int) -> Iterator[tuple[str, list[str]]]:
    """A drained file, and directories of jobs on nodes that have nothing of it."""
    with tempfile.TemporaryDirectory(dir=pfs) as far, tempfile.TemporaryDirectory(dir=bb) as near:
        run_dir = paths.run_dir(far, RUN)
        os.makedirs(run_dir)
        saved = [paths.job_dir(os.path.join(near, f"saved{node}"), JOB) for node in range(nodes)]
        for node, job_dir in enumerate(saved):
            make(job_dir, node, nodes, size_bytes // nodes)
        local.run(
            nodes,
            lambda comm: collective.drain(
                comm, run_dir=run_dir, job_dir=saved[comm.rank], iteration=ITERATION, skeleton=skeleton
            ),
        )
        yield run_dir, [paths.job_dir(os.path.join(near, f"node{node}"), JOB) for node in range(nodes)]


def possible() -> bool:
    """Whether there is an MPI to start movers with."""
    try:
        mpiexec()
    except ConfigError:
        return False
    return True


def measure(
    *,
    size_bytes: int,
    nodes: int = 4,
    repeats: int = 3,
    pfs: str | None = None,
    burst_buffer: str | None = None,
    rate_bytes_s: float | None = None,
) -> dict[str, float]:
    """Measure; seconds by name: ``alone``, ``fetch``, ``fetched_read``.

    Args:
        size_bytes: Size of the checkpoint.
        nodes: Movers, all on this host.
        repeats: Of each, in turn, in one launch of MPI.
        pfs: Directory for the drained file; default: the system's for temporary files.
        burst_buffer: Directory for the staged copies; default: ``/dev/shm``.
        rate_bytes_s: What storage gives to all movers together at most; None: what it gives.

    Raises:
        ConfigError: mpiexec is missing.
        ResilError: A mover failed.
    """
    shm = burst_buffer or ("/dev/shm" if os.path.isdir("/dev/shm") else None)  # noqa: S108 - a fresh directory in it
    launcher = mpiexec()
    with _drained(pfs, shm, size_bytes, nodes) as (run_dir, job_dirs):
        argv = [launcher, "-n", str(nodes), sys.executable, "-m", "slurm_resil.bench.fetch_rank", run_dir]
        done = subprocess.run(
            [*argv, str(repeats), str(rate_bytes_s or 0), *job_dirs], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ResilError(f"a mover ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found
