"""One mover of a fetch, over MPI: prints what it has read of files by the kernel's count, and its memory.

``python fetch_rank.py RUN_DIR JOB_DIR``
"""

from __future__ import annotations

import json
import sys

from slurm_resil.comm import mpi
from slurm_resil.drain.fetch import ALL, fetch


def rchar() -> int:
    """Bytes that this process has asked of any file or pipe."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(next(line for line in file if line.startswith("rchar:")).split()[1])


def memory(name: str) -> int:
    """A value of ``/proc/self/status``, bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return int(next(line for line in file if line.startswith(name)).split()[1]) << 10


def main() -> None:
    """Fetch everything."""
    run_dir, job_dir = sys.argv[1:]
    comm = mpi.world()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the highest memory counts from here on
    before, base = rchar(), memory("RssAnon")
    outcome = fetch(comm, run_dir=run_dir, job_dir=job_dir, iteration=None, env={}, what=ALL)
    found = {
        "rchar": rchar() - before,
        "read": outcome.read_bytes[comm.rank],
        "staged": outcome.staged_bytes,
        "peak": memory("VmHWM") - base,
        "whole": memory("VmHWM"),
        "nodes": outcome.nodes,
    }
    sys.stdout.write(json.dumps(found) + "\n")  # one write
    sys.stdout.flush()


main()
