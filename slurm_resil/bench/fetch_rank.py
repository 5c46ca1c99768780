"""One of the movers that :mod:`slurm_resil.bench.fetch` starts over MPI."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable

from slurm_resil.bench.redundancy_rank import ITERATION
from slurm_resil.comm import mpi
from slurm_resil.comm.base import Communicator, allgather_json
from slurm_resil.core import paths
from slurm_resil.core.errors import ResilError
from slurm_resil.core.throttle import Throttle
from slurm_resil.drain.ahead import ahead, buffer
from slurm_resil.drain.fetch import ALL, fetch
from slurm_resil.drain.spreading import READ_BYTES
from slurm_resil.drain.storage import Reader
from slurm_resil.format.manifest import DrainedManifest, digest


class Rank:
    """A mover.

    Args:
        comm: All of them.
        run_dir: Run's directory.
        job_dir: Directory of the staged copy.
        rate_bytes_s: What storage gives to all movers together at most; None: what it gives.
    """

    def __init__(self, comm: Communicator, run_dir: str, job_dir: str, rate_bytes_s: float | None) -> None:
        self.comm, self.run_dir, self.job_dir, self.rate_bytes_s = comm, run_dir, job_dir, rate_bytes_s
        self.manifest = DrainedManifest.load(paths.drained_manifest(run_dir, ITERATION))
        self.file = paths.drained(run_dir, ITERATION)
        os.makedirs(os.path.dirname(job_dir), exist_ok=True)

    def timed(self, work: Callable[[], None]) -> float:
        """Run something on all movers at once, with nothing of the file in the page cache; seconds of the last one."""
        shutil.rmtree(self.job_dir, ignore_errors=True)
        return self.warm(work)

    def warm(self, work: Callable[[], None]) -> float:
        """The same with what is there."""
        if self.comm.rank == 0:
            with contextlib.suppress(OSError), open(self.file, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.comm.barrier()
        begin = time.perf_counter()
        work()
        return float(max(allgather_json(self.comm, time.perf_counter() - begin)))

    def alone(self) -> None:
        """Read and verify the whole file."""
        self._read(self.file, past=True)

    def fetch(self) -> None:
        """Fetch it."""
        done = fetch(
            self.comm,
            run_dir=self.run_dir,
            job_dir=self.job_dir,
            iteration=ITERATION,
            env={},
            what=ALL,
            cap_bytes_s=self.rate_bytes_s,
        )
        if done.nodes != self.comm.size:
            raise ResilError(f"not everything was staged: {'; '.join(done.words)}")

    def fetched(self) -> None:
        """Read and verify the staged copy."""
        self._read(paths.staged(self.job_dir, ITERATION), past=False)

    def _read(self, path: str, *, past: bool) -> None:
        reader, size, end = Reader(path, past=past), self.manifest.block_bytes, self.manifest.file_bytes
        step = READ_BYTES // size * size
        memory = [buffer(step), buffer(step)]

        rate = self.rate_bytes_s / self.comm.size if past and self.rate_bytes_s else None
        throttle = Throttle(rate, READ_BYTES)

        def job(number: int) -> Callable[[], memoryview]:
            def work() -> memoryview:
                begin, stop = number * step, min(end, (number + 1) * step)
                throttle.take(stop - begin)
                return reader.read(begin, stop, memory[number % 2]).data

            return work

        try:
            for number, data in enumerate(ahead(job(number) for number in range(-(-end // step)))):
                for at in range(0, len(data), size):
                    if digest(data[at : at + size]) != self.manifest.blocks[(number * step + at) // size]:
                        raise ResilError(f"{path} is damaged")
        finally:
            reader.close()


def main() -> None:
    """Measure; rank 0 prints one JSON object."""
    run_dir, repeats, rate, *job_dirs = sys.argv[1:]
    comm = mpi.world()
    rank = Rank(comm, run_dir, job_dirs[comm.rank], float(rate) or None)
    times: dict[str, list[float]] = {"alone": [], "fetch": [], "fetched_read": []}
    for _ in range(int(repeats)):
        times["alone"].append(rank.timed(rank.alone))
        times["fetch"].append(rank.timed(rank.fetch))
        times["fetched_read"].append(rank.warm(rank.fetched))
    if comm.rank == 0:
        print(json.dumps({name: statistics.median(each) for name, each in times.items()}))  # noqa: T201 - read by the benchmark
    comm.barrier()


if __name__ == "__main__":
    main()
