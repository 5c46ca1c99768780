"""How much slower a training gets while its checkpoints are protected and drained, at a limited rate and low priority.

The training is one process for each node, here on one host: it multiplies matrices, one thread each.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from slurm_resil.bench.launch import mpiexec
from slurm_resil.bench.redundancy import JOB, RUN, make
from slurm_resil.bench.redundancy_rank import ITERATION
from slurm_resil.core import paths
from slurm_resil.core.errors import ResilError

WINDOW_S = 10.0
_TRAIN = """
import os, sys, time
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
import numpy as np
a = np.random.default_rng(0).standard_normal((512, 512), np.float32)
while True:
    begin = time.monotonic()
    for _ in range(4):
        b = a @ a
    sys.stdout.write(f"{begin} {time.monotonic() - begin}\\n")
    sys.stdout.flush()
"""


def slower(burst_buffer: str, target: str, nodes: int, shard_bytes: int, repeats: int, window_s: float) -> float:
    """Mean iteration time while an encode and a drain run, over that without; medians of windows in turn.

    Args:
        burst_buffer: Directory for the shards.
        target: Directory that is drained to.
        nodes: Movers, and processes that train.
        shard_bytes: Size of each shard.
        repeats: Windows of each kind.
        window_s: The encode and the drain have about so long, seconds: this sets the limit of their rate.
    """
    run_dir = paths.run_dir(os.path.join(target, "training"), RUN)
    os.makedirs(run_dir)
    job_dirs = [paths.job_dir(os.path.join(burst_buffer, f"training{node}"), JOB) for node in range(nodes)]
    for node, job_dir in enumerate(job_dirs):
        make(job_dir, node, nodes, shard_bytes)
    cap = max(1, int(2 * shard_bytes * nodes / window_s))
    busy: list[tuple[float, float]] = []
    quiet: list[tuple[float, float]] = []
    log = os.path.join(burst_buffer, "iterations")
    with _training(log, nodes):
        time.sleep(min(1.0, window_s))
        for _ in range(repeats):
            begin = time.monotonic()
            _mover("encode", run_dir, job_dirs, cap, "--scheme", "xor" if nodes > 1 else "single")
            _mover("drain", run_dir, job_dirs, cap)
            end = time.monotonic()
            busy.append((begin, end))
            _clear(run_dir, job_dirs)
            time.sleep(end - begin)
            quiet.append((end, time.monotonic()))
    found = [_iterations(f"{log}{node}") for node in range(nodes)]
    return statistics.median(_mean(found, span) for span in busy) / statistics.median(
        _mean(found, span) for span in quiet
    )


@contextlib.contextmanager
def _training(log: str, nodes: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        running = []
        for node in range(nodes):
            out = stack.enter_context(open(f"{log}{node}", "wb"))
            running.append(subprocess.Popen([sys.executable, "-c", _TRAIN], stdout=out))
        try:
            yield
        finally:
            for process in running:
                process.kill()
                process.wait()


def _mover(verb: str, run_dir: str, job_dirs: Sequence[str], cap: int, *more: str) -> None:
    argv = [mpiexec()]
    for node, job_dir in enumerate(job_dirs):
        argv += [":"] if node else []
        argv += ["-n", "1", "-env", "SLURMD_NODENAME", f"node{node}", sys.executable, "-m", "slurm_resil", "mover"]
        argv += [verb, "--json", "--run-dir", run_dir, "--job-dir", job_dir, "--iteration", str(ITERATION)]
        argv += ["--cap", str(cap), *more]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-500:]
        raise ResilError(f"a mover ended with {done.returncode}: {words}")


def _clear(run_dir: str, job_dirs: Sequence[str]) -> None:
    for directory in (run_dir, *(paths.redundancy(job_dir) for job_dir in job_dirs)):
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(directory):
                os.unlink(os.path.join(directory, name))


def _iterations(path: str) -> list[tuple[float, float]]:
    """When each began, and how long it took, seconds; the last line may be torn."""
    with open(path, encoding="ascii") as file:
        rows = [line.split() for line in file if line.endswith("\n")]
    return [(float(begin), float(seconds)) for begin, seconds in rows]


def _mean(found: Sequence[Sequence[tuple[float, float]]], span: tuple[float, float]) -> float:
    begin, end = span
    inside = [seconds for rows in found for at, seconds in rows if begin <= at < end]
    if not inside:
        raise ResilError(f"no iteration of the training began in {end - begin:.2f} s")
    return statistics.fmean(inside)
