"""Throughput of the drain against a plain copy of the same bytes to the same place, in the same run.

Shards are made in the burst buffer as a run would have them, and drained by real movers over MPI. The reference is one
``cp`` for each node at the same time, all of them synced to storage: it neither hashes nor verifies.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_resil.bench.result import BenchResult
from slurm_resil.core import paths
from slurm_resil.core.errors import ConfigError, ResilError
from slurm_resil.format.manifest import Extent, Item, ShardManifest, digest

RUN, JOB, ITERATION = "bench", 1, 1
SIZE_BYTES = 256 << 20
_ITEMS = 16
_COLUMNS = 1024


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One set-up.

    Attributes:
        burst_buffer: Directory for the shards of all nodes.
        target: Directory for the drained file.
        nodes: Movers, each with one shard.
        size_bytes: Bytes of the whole checkpoint, each counted once.
        kind: ``rows`` and ``columns`` (every tensor sharded over all ranks by that dimension) or ``replicated``.
    """

    burst_buffer: str
    target: str
    nodes: int
    size_bytes: int
    kind: str

    @property
    def run_dir(self) -> str:
        """Run's directory."""
        return paths.run_dir(self.target, RUN)

    def job_dir(self, node: int) -> str:
        """Job's directory of a node."""
        return paths.job_dir(os.path.join(self.burst_buffer, f"node{node}"), JOB)

    def make(self) -> None:
        """Make and seal the shards: float32 tensors of random bytes."""
        os.makedirs(self.run_dir, exist_ok=True)
        rows = max(self.nodes, self.size_bytes // (_ITEMS * _COLUMNS * 4) // self.nodes * self.nodes)
        for node in range(self.nodes):
            for name in ("slots", "manifests"):
                os.makedirs(os.path.join(self.job_dir(node), name), exist_ok=True)
            items, at = [], 4096
            path = paths.slot(self.job_dir(node), node, 0)
            with open(path, "wb") as file:
                for index in range(_ITEMS):
                    item = self._item(node, index, rows, at)
                    seed = index if self.kind == "replicated" else index * self.nodes + node
                    data = np.random.default_rng(seed).bytes(item.nbytes)
                    file.seek(at)
                    file.write(data)
                    items.append(Item(**{**vars(item), "xxh3": digest(data)}))
                    at += item.nbytes
            ShardManifest(
                run_id=RUN,
                job_id=JOB,
                attempt=0,
                iteration=ITERATION,
                rank=node,
                world_size=self.nodes,
                node=f"node{node}",
                slot=os.path.basename(path),
                generation=1,
                items=tuple(items),
                values={},
            ).publish(paths.manifest(self.job_dir(node), ITERATION, node), sync=False)

    def _item(self, node: int, index: int, rows: int, at: int) -> Item:
        shape, start = (rows, _COLUMNS), (0, 0)
        if self.kind == "rows":
            shape, start = (rows // self.nodes, _COLUMNS), (rows // self.nodes * node, 0)
        elif self.kind == "columns":
            shape, start = (rows, _COLUMNS // self.nodes), (0, _COLUMNS // self.nodes * node)
        sharded = self.kind != "replicated"
        return Item(
            name=f"model/{index}",
            dtype="torch.float32",
            shape=shape,
            offset=at,
            nbytes=shape[0] * shape[1] * 4,
            sharing="sharded" if sharded else "plain",
            global_shape=(rows, shape[1] if not sharded else _COLUMNS // self.nodes * self.nodes),
            extents=(Extent(local=(0, 0), start=start, shape=shape),) if sharded else (),
        )

    def drain(self) -> dict[str, float]:
        """Drain once over MPI; times in seconds, with ``wall`` around starting and ending the processes too."""
        for name in os.listdir(self.run_dir):
            os.unlink(os.path.join(self.run_dir, name))
        argv = [mpiexec()]
        for node in range(self.nodes):
            argv += [":"] if node else []
            argv += ["-n", "1", sys.executable, "-m", "slurm_resil", "mover", "drain", "--json", "--no-nice"]
            argv += ["--run-dir", self.run_dir, "--job-dir", self.job_dir(node), "--iteration", str(ITERATION)]
        begin = time.monotonic()
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        wall = time.monotonic() - begin
        if done.returncode:
            raise ResilError(f"a mover ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        line = json.loads(done.stdout.splitlines()[-1])
        share = max(line["written_bytes"]) * self.nodes / sum(line["written_bytes"])
        return {**line["costs_s"], "seconds": line["seconds"], "wall": wall, "share": share}

    def copy(self) -> float:
        """Copy the same bytes plainly, one process for each node, synced; seconds."""
        cp = shutil.which("cp")
        if cp is None:
            raise ConfigError("there is no cp")
        outs = [os.path.join(self.target, f"copy-{node}") for node in range(self.nodes)]
        part = self.size_bytes // self.nodes if self.kind == "replicated" else None
        begin = time.monotonic()
        copies = [
            subprocess.Popen(self._copy_argv(cp, paths.slot(self.job_dir(node), node, 0), out, part))
            for node, out in enumerate(outs)
        ]
        codes = [process.wait() for process in copies]
        for out in outs:
            fd = os.open(out, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        seconds = time.monotonic() - begin
        for out in outs:
            os.unlink(out)
        if any(codes):
            raise ResilError(f"cp ended with {max(codes)}")
        return seconds

    def _copy_argv(self, cp: str, source: str, out: str, part: int | None) -> list[str]:
        if part is None:
            return [cp, "--reflink=never", source, out]
        dd = shutil.which("dd")
        if dd is None:
            raise ConfigError("there is no dd")
        blocks = max(1, part >> 20)
        return [dd, f"if={source}", f"of={out}", "bs=1M", f"count={blocks}", "status=none"]


def mpiexec() -> str:
    """Launcher of the MPI beside this interpreter, else from the path.

    Raises:
        ConfigError: There is none.
    """
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    found = beside if os.path.exists(beside) else shutil.which("mpiexec")
    if found is None:
        raise ConfigError("mpiexec is not found", mend="install the extra `mpi`")
    return found


def measure(
    *,
    size_bytes: int = SIZE_BYTES,
    nodes: int = 2,
    repeats: int = 3,
    target: str | None = None,
    burst_buffer: str | None = None,
    kinds: Sequence[str] = ("rows", "replicated", "columns"),
) -> BenchResult:
    """Measure.

    Args:
        size_bytes: Bytes of the checkpoint.
        nodes: Movers, all on this host.
        repeats: Drains and copies of each kind, in turn.
        target: Directory on the file system that is drained to; default: the system's for temporary files.
        burst_buffer: Directory for the shards; default: ``/dev/shm``.
        kinds: What to drain, see :class:`Bench`.

    Raises:
        ConfigError: mpiexec is missing.
        ResilError: A mover failed.
    """
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {}
    shm = burst_buffer or ("/dev/shm" if os.path.isdir("/dev/shm") else None)  # noqa: S108 - a fresh directory in it
    with tempfile.TemporaryDirectory(dir=shm) as source, tempfile.TemporaryDirectory(dir=target) as out:
        for kind in kinds:
            bench = Bench(
                burst_buffer=os.path.join(source, kind), target=out, nodes=nodes, size_bytes=size_bytes, kind=kind
            )
            bench.make()
            bench.copy()  # the first one finds everything cold
            drains, copies = [], []
            for _ in range(repeats):
                copies.append(bench.copy())
                drains.append(bench.drain())
            shutil.rmtree(bench.burst_buffer)
            middle = _median(drains)
            copied = statistics.median(copies)
            ratios[f"{kind}_drain_to_copy_throughput"] = copied / middle("seconds")
            ratios[f"{kind}_write_to_copy_throughput"] = copied / middle("write")
            ratios[f"{kind}_most_written_to_share"] = middle("share")
            figures[f"{kind}_drain_bytes_s"] = size_bytes / middle("seconds")
            figures[f"{kind}_copy_bytes_s"] = size_bytes / copied
            for name in ("skeleton", "write", "verify", "seconds", "wall"):
                figures[f"{kind}_{name}_s"] = middle(name)
    return BenchResult(bench="drain", size_bytes=size_bytes, repeats=repeats, ratios=ratios, figures=figures)


def _median(samples: Sequence[dict[str, float]]) -> Callable[[str], float]:
    return lambda name: statistics.median(sample[name] for sample in samples)
