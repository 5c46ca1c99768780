"""How long a drain takes against plain ways to bring the same bytes to the same place, in the same run.

Shards are made in the burst buffer as a run would have them, and drained by real movers over MPI, one for each node.
What it is compared with (:mod:`slurm_resil.bench.peers`) has as many processes, and syncs to storage too; it neither
hashes nor verifies. A drain's time is that of the drain: starting MPI is apart (``wall``).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_resil.bench import peers, training
from slurm_resil.bench.launch import PeakMemory, mpiexec
from slurm_resil.bench.result import BenchResult
from slurm_resil.core import paths
from slurm_resil.core.errors import ResilError
from slurm_resil.drain.collective import BUFFER_BYTES, VERIFY_CACHE, VERIFY_STORAGE
from slurm_resil.drain.pace import most_of_round
from slurm_resil.format.manifest import Extent, Item, ShardManifest, digest

RUN, JOB, ITERATION = "bench", 1, 1
SIZE_BYTES = 2 << 30
SETTLE_S = 3.0  # before each measured thing: the host of a guest takes free memory back meanwhile, so all begin alike
KILL_AT = 0.9
_ITEMS = 16
_COLUMNS = 256  # of float32: with two nodes, a column shard is in runs of 512 bytes


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

    def drain(
        self, *arguments: str, env: Mapping[str, str] | None = None, memory: PeakMemory | None = None
    ) -> dict[str, float]:
        """Drain once over MPI.

        Args:
            arguments: More of them for each mover.
            env: Variables of the movers' environment that are set too.
            memory: Looks at the movers.

        Returns:
            Times in seconds, with ``wall`` around starting and ending the processes too; ``share``: what the mover that
            wrote the most has written, over an equal share; ``written``: bytes that were written.

        Raises:
            ResilError: It did not come to its end.
        """
        begin = time.monotonic()
        done = self.start(*arguments, env=env, memory=memory)
        wall = time.monotonic() - begin
        if done.returncode:
            raise ResilError(f"a mover ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
        line = json.loads(done.stdout.splitlines()[-1])
        written = sum(line["written_bytes"])
        share = max(line["written_bytes"]) * self.nodes / max(written, 1)
        return {**line["costs_s"], "seconds": line["seconds"], "wall": wall, "share": share, "written": written}

    def start(
        self, *arguments: str, env: Mapping[str, str] | None = None, memory: PeakMemory | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the movers, whatever comes of it; see :meth:`drain`."""
        argv = [mpiexec()]
        for node in range(self.nodes):
            argv += [":"] if node else []
            argv += ["-n", "1", sys.executable, "-m", "slurm_resil", "mover", "drain", "--json", "--no-nice"]
            argv += ["--run-dir", self.run_dir, "--job-dir", self.job_dir(node), "--iteration", str(ITERATION)]
            argv += arguments
        with memory.of(self.run_dir) if memory else contextlib.nullcontext():
            return subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})})

    def clear(self) -> None:
        """Remove what drains have made."""
        for name in os.listdir(self.run_dir):
            os.unlink(os.path.join(self.run_dir, name))

    def sources(self) -> list[str]:
        """Slots, by node."""
        return [paths.slot(self.job_dir(node), node, 0) for node in range(self.nodes)]

    def runs(self) -> list[peers.Runs]:
        """Where the bytes of each node's slot go if nothing is put together: distance and size of its narrow runs."""
        width = _COLUMNS // self.nodes * 4
        return [peers.Runs(first=node * width, step=width * self.nodes, nbytes=width) for node in range(self.nodes)]

    def resumed(self) -> float:
        """Kill all movers when most is written, drain again; the part of all bytes that the second drain writes."""
        self.clear()
        load = self.size_bytes // self.nodes
        rounds = math.ceil(load / most_of_round(BUFFER_BYTES, load))
        killed = self.start(env={"SLURM_RESIL_FAULT": f"drain.round:kill@{math.ceil(KILL_AT * rounds) + 1}"})
        if killed.returncode == 0:
            raise ResilError("the movers were to be killed and came to their end")
        return self.drain()["written"] / self.size_bytes


def measure(
    *,
    size_bytes: int = SIZE_BYTES,
    nodes: int = 2,
    repeats: int = 3,
    target: str | None = None,
    burst_buffer: str | None = None,
    settle_s: float = SETTLE_S,
    training_s: float = training.WINDOW_S,
) -> BenchResult:
    """Measure.

    Args:
        size_bytes: Bytes of the checkpoint.
        nodes: Movers, all on this host.
        repeats: Of everything, in turn.
        target: Directory on the file system that is drained to; default: the system's for temporary files.
        burst_buffer: Directory for the shards; default: ``/dev/shm``.
        settle_s: Pause before each, seconds.
        training_s: Least duration of a window in which the training is looked at, seconds; 0: it is left out.

    Raises:
        ConfigError: mpiexec, dd or cp is missing.
        ResilError: A mover failed.
    """
    memory = PeakMemory()
    shm = burst_buffer or ("/dev/shm" if os.path.isdir("/dev/shm") else None)  # noqa: S108 - a fresh directory in it
    with tempfile.TemporaryDirectory(dir=shm) as source, tempfile.TemporaryDirectory(dir=target) as out:
        benches = {
            kind: Bench(
                burst_buffer=os.path.join(source, kind),
                target=os.path.join(out, kind),
                nodes=nodes,
                size_bytes=size_bytes,
                kind=kind,
            )
            for kind in ("rows", "columns", "replicated")
        }
        rows, columns = benches["rows"], benches["columns"]
        rows.make()
        columns.make()
        cache, storage = ("--verify", VERIFY_CACHE), ("--verify", VERIFY_STORAGE)
        what: dict[str, Callable[[], dict[str, float]]] = {
            "dd": lambda: _only(peers.dd(rows.sources(), out)),
            "cp": lambda: _only(peers.cp(rows.sources(), out)),
            "rows": lambda: rows.drain(*cache, memory=memory),
            "verified": lambda: rows.drain(*storage, memory=memory),
            "columns": lambda: columns.drain(*cache, memory=memory),
            "naive": lambda: _only(peers.naive(columns.sources(), columns.runs(), out)),
        }
        if peers.dcp_command():
            what["dcp"] = lambda: _only(peers.dcp(rows.sources(), out))
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in what}
        for number in range(repeats + 1):
            for name, work in what.items():
                for bench in (rows, columns):
                    bench.clear()
                time.sleep(settle_s if number else 0)
                samples[name].append(work())
        shutil.rmtree(columns.burst_buffer)
        resumed = statistics.median(rows.resumed() for _ in range(repeats))
        shutil.rmtree(rows.burst_buffer)
        rows.clear()
        benches["replicated"].make()
        replicated = benches["replicated"].drain(*cache, memory=memory)
        shutil.rmtree(benches["replicated"].burst_buffer)
        slower = training.slower(source, out, nodes, size_bytes // nodes, repeats, training_s) if training_s else None
    middle = {name: _median(found[1:]) for name, found in samples.items()}  # the first one finds all cold
    time_of = {name: found("seconds") for name, found in middle.items()}
    ratios = {
        "drain.dd": time_of["rows"] / time_of["dd"],
        "drain.cp": time_of["rows"] / time_of["cp"],
        **({"drain.dcp": time_of["rows"] / time_of["dcp"]} if "dcp" in time_of else {}),
        "drain.verified_dd": time_of["verified"] / time_of["dd"],
        "drain.strided": time_of["columns"] / time_of["rows"],
        "drain.strided_naive": time_of["columns"] / time_of["naive"],
        "drain.resume_bytes": resumed,
        **({"drain.training": slower} if slower is not None else {}),
        "drain.share": max(middle["rows"]("share"), middle["columns"]("share"), replicated["share"]),
    }
    figures = {f"{name}_s": seconds for name, seconds in time_of.items()}
    for name in ("rows", "verified", "columns"):
        figures |= {f"{name}_{part}_s": middle[name](part) for part in ("skeleton", "write", "verify", "wall")}
    figures["mover_bytes"] = float(memory.most)
    return BenchResult(bench="drain", size_bytes=size_bytes, repeats=repeats, ratios=ratios, figures=figures)


def _only(seconds: float) -> dict[str, float]:
    return {"seconds": seconds}


def _median(samples: Sequence[Mapping[str, float]]) -> Callable[[str], float]:
    return lambda name: statistics.median(sample[name] for sample in samples)
