"""One mover of ``bench redundancy``: encodes, and does what an encode is compared with, in turn."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from slurm_resil.comm import mpi
from slurm_resil.comm.base import Bytes, Communicator, allgather_json
from slurm_resil.core.schemes import Scheme
from slurm_resil.redundancy import gf, member
from slurm_resil.redundancy.encode import Options, encode
from slurm_resil.redundancy.flow import SEGMENT_BYTES
from slurm_resil.redundancy.geometry import Geometry

ITERATION = 1
PIECES_BYTES = (1 << 20, 16 << 20)  # of a message; the faster counts


class Rank:
    """This mover.

    Args:
        comm: All movers.
        run_dir: Run's directory.
        job_dir: This node's burst buffer.
        size_bytes: Bytes of the shard.
    """

    def __init__(self, comm: Communicator, run_dir: str, job_dir: str, size_bytes: int) -> None:
        self.comm, self.run_dir, self.job_dir, self.size_bytes = comm, run_dir, job_dir, size_bytes
        self.peak_bytes = self._looks = 0

    def encode(self, scheme: Scheme) -> float:
        """Encode, as one of many by the same scheme; seconds."""
        self._encode(scheme)
        return self._encode(scheme)

    def _encode(self, scheme: Scheme) -> float:
        member.prune(self.job_dir, [], [])
        options = Options(scheme=scheme, set_size=self.comm.size)

        def work() -> None:
            encode(
                self.comm,
                run_dir=self.run_dir,
                job_dir=self.job_dir,
                iteration=ITERATION,
                options=options,
                env={"SLURMD_NODENAME": f"node{self.comm.rank}"},
                progress=lambda _: self.look(),
            )

        return self.timed(work)

    def look(self) -> None:
        """Look at how much memory this process has that is no file's, every so often."""
        self._looks += 1
        if self._looks % 64:
            return
        with open("/proc/self/status", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        self.peak_bytes = max(self.peak_bytes, int(fields["RssAnon"].split()[0]) << 10)

    def timed(self, work: Callable[[], None]) -> float:
        """Run something on all movers at once; seconds until the last one is done."""
        self.comm.barrier()
        begin = time.perf_counter()
        work()
        return float(max(allgather_json(self.comm, time.perf_counter() - begin)))

    def copy(self) -> float:
        """Copy as many bytes as the shard has in memory; seconds."""
        source, target = np.ones(self.size_bytes, np.uint8), np.ones(self.size_bytes, np.uint8)
        return self.timed(lambda: np.copyto(target, source))

    def sendrecv(self) -> float:
        """Send as many bytes as the shard has to the other movers in turn, and receive as many; seconds."""
        others = self.comm.size - 1
        chunk = self.size_bytes // others
        out, into = np.ones(self.size_bytes, np.uint8), np.ones(chunk, np.uint8)
        return min(self.timed(partial(self._turns, out, into, piece)) for piece in PIECES_BYTES)

    def _turns(self, out: Bytes, into: Bytes, piece: int) -> None:
        size = self.comm.size
        for turn in range(1, size):
            to, source = (self.comm.rank + turn) % size, (self.comm.rank - turn) % size
            first = (turn - 1) * into.size
            for at in range(0, into.size, piece):
                stop = min(at + piece, into.size)
                receiving = self.comm.irecv(into[at:stop], source)
                sending = self.comm.isend(out[first + at : first + stop], to)
                receiving.wait()
                sending.wait()

    def codec(self, scheme: Scheme) -> float:
        """Make the parities of as many bytes as the shard has, in memory; seconds."""
        geometry = Geometry.of(scheme, self.comm.size)
        math, source = gf.Workspace(), np.ones(self.size_bytes // 8 * 8, np.uint8)
        totals = [np.zeros(SEGMENT_BYTES, np.uint8) for _ in range(geometry.losses)]
        code, factors = geometry.coefficients(), gf.factors(geometry.losses)

        def work() -> None:
            for number, at in enumerate(range(0, source.size, SEGMENT_BYTES)):
                piece = source[at : at + SEGMENT_BYTES]
                for row, total in enumerate(totals):
                    if factors:
                        math.double(total[: piece.size], factors[row])
                        math.add(total[: piece.size], piece)
                    else:
                        math.add(total[: piece.size], piece, code[row][number % geometry.chunks])

        return self.timed(work)


def main() -> None:
    """Measure; rank 0 prints one JSON object."""
    run_dir, size_bytes, repeats, *job_dirs = sys.argv[1:]
    comm = mpi.world()
    rank = Rank(comm, run_dir, job_dirs[comm.rank], int(size_bytes))
    xor, rs = Scheme.parse("xor"), Scheme.parse("rs:2")
    what: dict[str, Callable[[], float]] = {
        "copy": rank.copy,
        "sendrecv": rank.sendrecv,
        "xor": lambda: rank.encode(xor),
        "codec": lambda: rank.codec(rs),
        "rs": lambda: rank.encode(rs),
    }
    times: dict[str, list[float]] = {name: [] for name in what}
    for _ in range(int(repeats) + 1):
        for name, work in what.items():
            times[name].append(work())
    result = {name: statistics.median(each[1:]) for name, each in times.items()}  # the first one finds all cold
    result["mover_bytes"] = max(allgather_json(comm, rank.peak_bytes))
    if comm.rank == 0:
        print(json.dumps({**result, "times": times}))  # noqa: T201 - read by the benchmark
    comm.barrier()


if __name__ == "__main__":
    main()
