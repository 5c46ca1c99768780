"""Fetch over real MPI: one process per "node", each with its own burst buffer directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from shardworld import Local, World, mpiexec

from slurm_resil.core import paths

pytestmark = pytest.mark.mpi

MIB = 1 << 20
RANK = str(Path(__file__).with_name("fetch_rank.py"))


@pytest.fixture
def world(tmp_path: Path) -> World:
    """96 MiB in one file."""
    data = np.frombuffer(np.random.default_rng(3).bytes(96 * MIB), np.float32)
    made = World(root=tmp_path, ranks=1, per_node=1, states=[{"model/weight": Local(data)}])
    made.seal()
    made.drain()
    return made


def run(world: World, nodes: int, **env: str) -> subprocess.CompletedProcess[str]:
    line = [mpiexec()]
    for node in range(nodes):
        os.makedirs(f"{world.root}/other{node}", exist_ok=True)
        job_dir = f"{world.root}/other{node}/job-10"
        line += [*([":"] if node else []), "-n", "1", sys.executable, RANK, world.run_dir, job_dir]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, env={**os.environ, **env})


def test_each_byte_is_read_once_and_memory_is_bounded(world: World) -> None:
    done = run(world, 3)
    assert done.returncode == 0, done.stderr
    movers = [json.loads(line) for line in done.stdout.splitlines()]
    path = paths.drained(world.run_dir, 40)
    size = os.path.getsize(path)
    assert sum(one["read"] for one in movers) == size
    assert {one["staged"] for one in movers} == {3 * size} and {one["nodes"] for one in movers} == {3}
    # by the kernel's count: MPI and the manifests come on top, but nobody has read the file twice
    assert size <= sum(one["rchar"] for one in movers) < size + 8 * MIB
    assert max(one["rchar"] for one in movers) < size / 3 + 20 * MIB
    assert max(one["peak"] for one in movers) < 128 * MIB
    whole = Path(path).read_bytes()
    for node in range(3):
        assert Path(paths.staged(f"{world.root}/other{node}/job-10", 40)).read_bytes() == whole


@pytest.mark.parametrize(("nodes", "fault"), [(2, "fetch.write:kill@20"), (1, "fetch.round:kill")])
def test_what_a_killed_fetch_has_staged_is_not_read_again(world: World, nodes: int, fault: str) -> None:
    first = run(world, nodes, SLURM_RESIL_FAULT=fault)
    assert first.returncode != 0
    done = run(world, nodes)
    assert done.returncode == 0, done.stderr
    movers = [json.loads(line) for line in done.stdout.splitlines()]
    assert 0 < sum(one["read"] for one in movers) < 0.9 * 96 * MIB
    whole = Path(paths.drained(world.run_dir, 40)).read_bytes()
    for node in range(nodes):
        assert Path(paths.staged(f"{world.root}/other{node}/job-10", 40)).read_bytes() == whole
