"""A drained checkpoint is staged on the nodes: by the mover alone over PMI2, and by the launcher while ranks start."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from launched import FAULT, ROOT, Job, jobs, wait_for
from owners import own

from slurm_resil.core import layout, paths
from slurm_resil.core.layout import Layout
from slurm_resil.drain import needs
from slurm_resil.format import staged
from slurm_resil.format.manifest import DrainedManifest, digest
from slurm_resil.recovery.actions import SETTLE_S
from slurm_resil.sandbox import Sandbox
from slurm_resil.sandbox.procs import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "drain"))

from shardworld import ITERATION, World, build

pytestmark = [pytest.mark.cluster, pytest.mark.mpi, pytest.mark.torch]

JOB = "job-9"
SCALE = 8000  # some blocks of 4 MiB
SCRIPT = """#!/bin/bash
export PYTHONPATH={fault}/movesite:{root} PYTHONDONTWRITEBYTECODE=1 PATH={bin}:$PATH OMP_NUM_THREADS=1
export SLURM_RESIL_PREFIX={prefix} SLURM_RESIL_REDUNDANCY=single SLURM_RESIL_BB_ROOT=/dev/shm/fetch
python -m slurm_resil run {launcher} --run-id llama --every 10 -- python {train} --real {options}
"""


@pytest.fixture(scope="module")
def sandbox(cluster_factory: Callable[..., Sandbox]) -> Iterator[Sandbox]:
    pytest.importorskip("mpi4py")
    made = cluster_factory(nodes=3, grace_time_s=12)  # one of them is a spare
    yield made
    made.down()


# the mover alone


@pytest.fixture
def world(sandbox: Sandbox) -> Iterator[World]:
    """A durable checkpoint of four ranks on two nodes, which have nothing of it."""
    wait_until("idle nodes", lambda: set(sandbox.node_states().values()) == {"idle"}, timeout_s=240)
    root = sandbox.pfs / "fetch"
    root.mkdir()
    made = build(root, ranks=4, per_node=2, scale=SCALE)
    made.seal()
    made.drain()
    nodes = tuple(sandbox.nodes[:2])
    made.job_dirs = [str(sandbox.node_path(node, sandbox.bb / JOB)) for node in nodes]
    layout.save(made.run_dir, Layout(nodes=nodes, ranks_per_node=2), 0)
    for top in (root, *map(Path, made.job_dirs)):  # the prolog makes the latter
        top.mkdir(exist_ok=True)
        own(sandbox, top)
    yield made
    for pid in movers(made):  # of a test that failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for top in (root, *map(Path, made.job_dirs)):
        shutil.rmtree(top, ignore_errors=True)


def argv(sandbox: Sandbox, world: World) -> list[str]:
    shape = [
        "srun",
        "--overlap",
        f"--nodelist={','.join(sandbox.nodes[:2])}",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--mpi=pmi2",
    ]
    program = [sys.executable, "-m", "slurm_resil", "mover", "fetch", "--json"]
    places = ["--run-dir", world.run_dir, "--job-dir", str(sandbox.bb / JOB)]
    return [*shape, "--kill-on-bad-exit=1", *program, *places]


def fetch(sandbox: Sandbox, world: World, **env: str) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(ROOT), **env}
    return sandbox.run(argv(sandbox, world), user="alice", check=False, timeout_s=120, env=env)


def movers(world: World) -> list[int]:
    """Processes of the step, as this host numbers them, lowest first."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit():
                line = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                if line[1:5] == [b"-m", b"slurm_resil", b"mover", b"fetch"] and world.run_dir.encode() in line:
                    found.append(int(entry))
    return sorted(found)


def check(world: World) -> DrainedManifest:
    """Both nodes have all that they need, bit for bit."""
    manifest = DrainedManifest.load(paths.drained_manifest(world.run_dir, ITERATION))
    for node, job_dir in enumerate(world.job_dirs):
        need = needs.need(manifest, job_dir, range(2 * node, 2 * node + 2), 4).blocks
        there = staged.StagedManifest.load(paths.staged_manifest(job_dir, ITERATION)).there(manifest)
        assert np.array_equal(need & there, need)
        raw = Path(paths.staged(job_dir, ITERATION)).read_bytes()
        for index in np.flatnonzero(there):
            block = raw[index * manifest.block_bytes : (index + 1) * manifest.block_bytes]
            assert digest(block) == manifest.blocks[index]
    return manifest


def test_two_nodes_get_it_and_each_byte_is_read_once(sandbox: Sandbox, world: World) -> None:
    done = fetch(sandbox, world)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["event"] == "fetched" and (line["nodes"], line["of"], line["kept_bytes"]) == (2, 2, 0)
    manifest = check(world)
    assert len(manifest.blocks) > 4
    assert sum(line["read_bytes"]) == manifest.file_bytes
    assert max(line["read_bytes"]) <= 0.75 * manifest.file_bytes
    again = json.loads(fetch(sandbox, world).stdout.splitlines()[-1])
    assert again["kept_bytes"] == line["bytes"] and again["bytes"] == sum(again["read_bytes"]) == 0


@pytest.mark.parametrize("point", ["fetch.survey", "fetch.open", "fetch.read", "fetch.write", "fetch.publish"])
def test_a_mover_that_is_killed_and_the_next_fetch(sandbox: Sandbox, world: World, point: str) -> None:
    when = "@2" if point in ("fetch.read", "fetch.write") else ""
    done = fetch(sandbox, world, SLURM_RESIL_FAULT=f"{point}:kill{when}")
    assert done.returncode != 0
    wait_until("both gone", lambda: not movers(world), timeout_s=30)
    for job_dir in world.job_dirs:
        assert not os.path.exists(paths.staged_manifest(job_dir, ITERATION))
        assert staged.wait(job_dir, ITERATION) < 1.0  # no rank waits for the dead
    done = fetch(sandbox, world)
    assert done.returncode == 0, done.stderr
    check(world)


# by the launcher


class Fetched:
    """A run that goes on in another job, whose nodes have nothing of it."""

    def __init__(self, sandbox: Sandbox, make: Callable[..., Job]) -> None:
        self.sandbox, self._make = sandbox, make
        self.prefix = sandbox.pfs / f"runs-{os.urandom(4).hex()}"
        self.prefix.mkdir()
        self.prefix.chmod(0o777)
        self.go = self.prefix / "go"

    def start(self, iterations: int, *options: str) -> Job:
        script = SCRIPT.replace("{fault}", str(FAULT)).replace("{prefix}", str(self.prefix))
        sbatch = ("-N2", "--ntasks-per-node=1")
        job = self._make("--iterations", str(iterations), *options, script=script, sbatch=sbatch)
        job.run_dir = self.prefix / "llama"
        return job

    def begun(self) -> tuple[Job, list[str]]:
        """The first job comes to its end; another goes on, and its nodes have the checkpoint, its ranks do not yet."""
        first = self.start(10)
        first.assert_complete(10, ranks=2)
        job = self.start(30, "--pace", "0.3", "--await", str(self.go))
        fetched = job.wait_event("fetched")
        assert fetched["iteration"] == 10 and "2 of 2 nodes have what they need" in fetched["words"]
        bb = f"/dev/shm/fetch/job-{job.id}"
        nodes = job.named("attempt_start")[-1]["nodes"]
        return job, [str(self.sandbox.node_path(node, bb)) for node in nodes]

    def end(self, job: Job, job_dirs: list[str]) -> None:
        """The ranks restore, the space is given back, and the training comes to the right end."""
        self.go.touch()
        wait_for(f"a start\n{job.out}", lambda: len(job.starts(1)) == 2)
        assert {tuple(line["loaded"][-1]) for line in job.starts(1).values()} == {("drained", 10)}
        wait_for("space", lambda: not any(os.listdir(paths.fetched(job_dir)) for job_dir in job_dirs))
        job.wait_state("COMPLETED", timeout_s=90)
        job.assert_complete(30, ranks=2)


@pytest.fixture
def run(sandbox: Sandbox) -> Iterator[Fetched]:
    with jobs(sandbox) as make:
        yield Fetched(sandbox, make)


def flip(path: str) -> None:
    """Damage every block of a drained file's data."""
    with open(path, "r+b") as file:
        for at in range(4096, os.path.getsize(path), 4096):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))


def test_ranks_restore_what_was_staged_while_they_started(run: Fetched) -> None:
    job, job_dirs = run.begun()
    flip(paths.drained(str(job.run_dir), 10))  # who reads the file finds it damaged
    run.end(job, job_dirs)
    assert not job.named("set_aside") and not job.named("restore_failed")


@pytest.mark.full
def test_ranks_restore_from_the_file_where_the_copy_is_damaged(run: Fetched) -> None:
    job, job_dirs = run.begun()
    flip(paths.staged(job_dirs[1], 10))
    run.end(job, job_dirs)
    assert "do not match their hash; they are read from" in job.out


@pytest.mark.full
def test_a_node_that_takes_the_place_of_a_lost_one_gets_what_it_needs(sandbox: Sandbox, run: Fetched) -> None:
    run.go.touch()
    job = run.start(60, "--pace", "0.2", "--await", str(run.go))
    job.wait_event("durable")
    run.go.unlink()
    sandbox.node_kill("node2")
    sandbox.node_wipe("node2")
    lost = job.wait_event("node_lost", timeout_s=30)
    job.wait_event("requeued")
    wait_for("the other node", lambda: "node1" not in job.record["NodeList"])
    time.sleep(SETTLE_S)  # not within the second of the kill: slurmd would take the new start for what was killed
    sandbox.run(["scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test"])
    job.hurry(1)
    fetched = job.wait_event("fetched")
    assert fetched["iteration"] == lost["durable"] > 0
    assert fetched["words"].startswith(("1 of 1 nodes have what they need", "2 of 2 nodes have what they need"))
    run.go.touch()
    wait_for(f"a start\n{job.out}", lambda: len(job.starts(1)) == 2)
    loaded = {line["node"]: tuple(line["loaded"][-1]) for line in job.starts(1).values()}
    assert loaded["node3"] == ("drained", lost["durable"])
    assert loaded["node1"][1] == lost["durable"]
    job.assert_complete(60, ranks=2, skips=True)
