"""The commands over real MPI: one process per "node", each with its own burst buffer directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from setworld import ITERATION, members, snapshot, wipe, world
from shardworld import World, mpiexec

from slurm_resil.core import paths

pytestmark = pytest.mark.mpi


def mover(world: World, what: str, *options: str, fault: tuple[int, str] | None = None):
    argv = [mpiexec()]
    for node in range(world.nodes):
        argv += [":"] if node else []
        argv += ["-env", "SLURMD_NODENAME", f"node{node}"]
        if fault is not None and fault[0] == node:
            argv += ["-env", "SLURM_RESIL_FAULT", fault[1]]
        argv += ["-n", "1", sys.executable, "-m", "slurm_resil", "mover", what, "--run-dir", world.run_dir]
        argv += ["--job-dir", world.job_dir(node), "--json", *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def last(done) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_encode_and_rebuild(tmp_path):
    here = world(tmp_path, 3)
    line = last(mover(here, "encode", "--scheme", "xor", "--cap", "1e9"))
    assert line["event"] == "encoded" and line["iteration"] == ITERATION and line["losses"] == 1
    assert line["bytes"] > line["parity_bytes"] > 0 and not line["already"]
    before = snapshot(here)
    assert last(mover(here, "encode", "--scheme", "xor"))["already"]
    wipe(here, 1)
    line = last(mover(here, "rebuild"))
    assert (line["event"], line["iteration"], line["nodes"]) == ("rebuilt", ITERATION, ["node1"])
    assert snapshot(here) == before
    assert last(mover(here, "rebuild"))["nodes"] == []
    wipe(here, 1, 2)
    done = mover(here, "rebuild")
    assert done.returncode == 65
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["event"] == "failed" and "lost 2 of its nodes (node1, node2), it covers 1" in line["error"]


@pytest.mark.parametrize(
    "point", ["encode.open", "encode.segment@2", "encode.verify", "encode.rename", "encode.publish"]
)
def test_a_mover_killed_in_an_encode(tmp_path, point):
    here = world(tmp_path, 3)
    name, _, when = point.partition("@")
    before = snapshot(here)
    assert mover(here, "encode", fault=(1, f"{name}:kill@{when or 1}")).returncode != 0
    assert len(members(here)) < 3 and not os.path.exists(paths.member(here.job_dir(1), ITERATION, 1))
    after = snapshot(here)
    assert {path: after[path] for path in before} == before
    assert not last(mover(here, "encode"))["already"]
    kept = snapshot(here)
    assert not any(path.endswith(".part") for path in kept)
    wipe(here, 1)
    last(mover(here, "rebuild"))
    assert snapshot(here) == kept


@pytest.mark.parametrize(
    "point",
    ["rebuild.survey", "rebuild.open", "rebuild.segment", "rebuild.verify", "rebuild.publish", "rebuild.parity"],
)
def test_a_mover_killed_in_a_rebuild(tmp_path, point):
    here = world(tmp_path, 3)
    last(mover(here, "encode"))
    before = snapshot(here)
    wipe(here, 1)
    assert mover(here, "rebuild", fault=(1 if point != "rebuild.segment" else 0, f"{point}:kill")).returncode != 0
    assert last(mover(here, "rebuild"))["nodes"] in (["node1"], [])
    assert snapshot(here) == before
