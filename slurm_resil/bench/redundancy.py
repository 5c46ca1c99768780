"""What an encode costs against what it cannot do without: copying memory, sending, and the code itself."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile

import numpy as np

from slurm_resil.bench.launch import mpiexec
from slurm_resil.bench.redundancy_rank import ITERATION
from slurm_resil.bench.result import BenchResult
from slurm_resil.core import paths
from slurm_resil.core.errors import ResilError
from slurm_resil.core.model import RunInfo
from slurm_resil.format import blocks, frame, stamp
from slurm_resil.format.manifest import Extent, Item, ShardManifest

RUN, JOB = "bench", 1
SIZE_BYTES = 256 << 20  # of a node
_ITEMS = 16
_FIRST = 4096


def make(job_dir: str, node: int, nodes: int, size_bytes: int) -> None:
    """Make a sealed shard of random bytes, a part of tensors that are sharded over all nodes."""
    for name in ("slots", "manifests"):
        os.makedirs(os.path.join(job_dir, name))
    path, each = paths.slot(job_dir, node, 0), size_bytes // _ITEMS // 64 * 64
    random = np.random.default_rng(node)
    run = RunInfo(run_id=RUN, job_id=JOB, attempt=0, cycle=0, world_size=nodes, nodes=nodes)
    mark = stamp.make(run, generation=1, iteration=ITERATION, rank=node)
    items = []
    with open(path, "w+b") as file:
        file.truncate(_FIRST + each * _ITEMS)
        with mmap.mmap(file.fileno(), 0) as data:
            stamp.begin(data, mark)
            for index in range(_ITEMS):
                at = _FIRST + index * each
                data[at : at + each] = random.bytes(each)
                state = blocks.ItemHash(blocks.block_size(each))
                state.update(data[at : at + each])
                xxh3, hashes = state.finish()
                items.append(
                    Item(
                        name=f"model/{index}",
                        dtype="torch.uint8",
                        shape=(each,),
                        offset=at,
                        nbytes=each,
                        sharing="sharded",
                        global_shape=(each * nodes,),
                        extents=(Extent(local=(0,), start=(each * node,), shape=(each,)),),
                        xxh3=xxh3,
                        block_bytes=blocks.block_size(each),
                        blocks=hashes,
                    )
                )
            stamp.end(data, mark)
            outer = frame.digest(lambda start, stop: data[start:stop], frame.spans(items), len(data))
    ShardManifest(
        run_id=RUN,
        job_id=JOB,
        attempt=0,
        iteration=ITERATION,
        rank=node,
        world_size=nodes,
        node=f"node{node}",
        slot=os.path.basename(path),
        generation=1,
        items=tuple(items),
        values={},
        frame=outer,
    ).publish(paths.manifest(job_dir, ITERATION, node), sync=False)


def measure(
    *, size_bytes: int = SIZE_BYTES, nodes: int = 4, repeats: int = 3, directory: str | None = None
) -> BenchResult:
    """Measure.

    Args:
        size_bytes: Bytes of each node's shard.
        nodes: Movers, all on this host, in one set.
        repeats: Encodes and what they are compared with, in turn, in one launch of MPI.
        directory: Where the burst buffers lie; default: ``/dev/shm``.

    Raises:
        ConfigError: mpiexec is missing.
        ResilError: A mover failed.
    """
    shm = directory or ("/dev/shm" if os.path.isdir("/dev/shm") else None)  # noqa: S108 - a fresh directory in it
    with tempfile.TemporaryDirectory(dir=shm) as top:
        run_dir = paths.run_dir(os.path.join(top, "pfs"), RUN)
        os.makedirs(run_dir)
        job_dirs = [paths.job_dir(os.path.join(top, f"node{node}"), JOB) for node in range(nodes)]
        for node, job_dir in enumerate(job_dirs):
            make(job_dir, node, nodes, size_bytes)
        argv = [mpiexec(), "-n", str(nodes), sys.executable, "-m", "slurm_resil.bench.redundancy_rank", run_dir]
        argv += [str(size_bytes), str(repeats), *job_dirs]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ResilError(f"a mover ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        found = json.loads(done.stdout.splitlines()[-1])
    figures = {f"{name}_bytes_s": size_bytes / found[name] for name in ("copy", "sendrecv", "xor", "codec", "rs")}
    return BenchResult(
        bench="redundancy",
        size_bytes=size_bytes,
        repeats=repeats,
        ratios={
            "redundancy.xor_limit": found["xor"] / max(found["copy"], found["sendrecv"]),
            "redundancy.rs_codec": found["rs"] / found["codec"],
        },
        figures={**figures, "mover_bytes": found["mover_bytes"]},
    )
