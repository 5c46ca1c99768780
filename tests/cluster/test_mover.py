"""The drain as the launcher starts it: one process per node by srun over PMI2, as a user, on nodes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_resil.core import paths
from slurm_resil.core.errors import ServiceError
from slurm_resil.drain import lease
from slurm_resil.sandbox import Sandbox
from slurm_resil.sandbox.procs import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "drain"))

from owners import own
from shardworld import ITERATION, World, build

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

JOB = "job-9"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two_nodes(cluster_factory) -> Iterator[Sandbox]:
    pytest.importorskip("mpi4py")
    sandbox = cluster_factory(nodes=2)
    yield sandbox
    sandbox.down()


@pytest.fixture
def world(two_nodes: Sandbox) -> Iterator[World]:
    """Four ranks on two nodes, sealed, everything alice's."""
    # the job of the test before is off its nodes, which takes Slurm minutes when a message was lost
    wait_until("idle nodes", lambda: set(two_nodes.node_states().values()) == {"idle"}, timeout_s=240)
    root = two_nodes.pfs / "drain"
    root.mkdir()
    made = build(root, ranks=4, per_node=2, scale=20)
    made.job_dirs = [str(two_nodes.node_path(node, two_nodes.bb / JOB)) for node in two_nodes.nodes]
    made.seal()
    for top in (root, *map(Path, made.job_dirs)):
        own(two_nodes, top)
    yield made
    for pid in movers(made):  # of a test that failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for top in (root, *map(Path, made.job_dirs)):
        shutil.rmtree(top, ignore_errors=True)


def argv(cluster: Sandbox, world: World, *options: str) -> list[str]:
    shape = [
        "srun",
        "--overlap",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--mpi=pmi2",
        "--kill-on-bad-exit=1",
    ]
    program = [sys.executable, "-m", "slurm_resil", "mover", "drain", "--json", "--iteration", str(ITERATION)]
    return [*shape, *program, "--run-dir", world.run_dir, "--job-dir", str(cluster.bb / JOB), *options]


def drain(cluster: Sandbox, world: World, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return cluster.run(
        argv(cluster, world, *options), user="alice", check=False, timeout_s=90, env={"PYTHONPATH": str(ROOT), **env}
    )


def movers(world: World, state: str = "") -> list[int]:
    """Processes of the step, as this host numbers them, lowest first; those in one state if one is given."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                line = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                now = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            ours = line[1:5] == [b"-m", b"slurm_resil", b"mover", b"drain"] and world.run_dir.encode() in line
            if ours and state in ("", now):
                found.append(int(entry))
    return sorted(found)


def start(cluster: Sandbox, world: World, fault: str) -> subprocess.Popen[str]:
    command = cluster.command(
        argv(cluster, world, "--buffer", "4096"),
        user="alice",
        env={"PYTHONPATH": str(ROOT), "SLURM_RESIL_FAULT": fault},
    )
    pipe = subprocess.PIPE
    return subprocess.Popen(command.argv, env=command.env, cwd=command.cwd, stdout=pipe, stderr=pipe, text=True)


def wait_both_stopped(cluster: Sandbox, world: World) -> None:
    try:
        wait_until("both stopped", lambda: len(movers(world, "T")) == 2, timeout_s=60)
    except ServiceError:  # whose fault is it: ours, or was there no start?
        print("movers", movers(world), "stopped", movers(world, "T"))
        print(cluster.run(["squeue", "-a"], check=False).stdout, cluster.run(["sinfo", "-N"], check=False).stdout)
        raise


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


def test_drains_over_two_nodes_as_a_user(two_nodes, world):
    done = drain(two_nodes, world)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["event"] == "drained" and len(line["written_bytes"]) == 2
    assert max(line["written_bytes"]) <= 1.5 * line["bytes"] / 2
    world.check()
    for job_dir in world.job_dirs:
        assert os.path.exists(paths.durable(job_dir, ITERATION))
    again = drain(two_nodes, world)
    assert again.returncode == 0 and json.loads(again.stdout.splitlines()[-1])["already"] is True


def test_shards_missing_on_a_node(two_nodes, world):
    os.unlink(paths.manifest(world.job_dirs[1], ITERATION, 3))
    done = drain(two_nodes, world)
    assert done.returncode == 75 and "is not sealed by rank 3 of 4" in done.stderr
    assert world.published() == [] and world.leftovers() == []


def test_a_flipped_shard_is_named_with_its_node(two_nodes, world):
    world.flip(2, "model/rows")
    done = drain(two_nodes, world)
    assert done.returncode == 65 and "rank 2 on node1" in done.stderr  # the name of the node in its manifest
    assert world.published() == [] and world.leftovers() == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_mover_killed_on_one_node_and_the_next_drain(two_nodes, world, victim):
    """S12."""
    process = start(two_nodes, world, "drain.round:stop@2")
    wait_both_stopped(two_nodes, world)
    os.kill(movers(world)[victim], signal.SIGKILL)
    for pid in movers(world):
        os.kill(pid, signal.SIGCONT)
    assert end(process)[0] != 0
    wait_until("both gone", lambda: not movers(world), timeout_s=30)
    assert world.published() == []
    done = drain(two_nodes, world)
    assert done.returncode == 0, done.stderr
    world.check()


def test_scancel_with_sigterm_publishes_nothing_and_the_next_drain_goes_on(two_nodes, world):
    process = start(two_nodes, world, "drain.round:stop@2")
    wait_both_stopped(two_nodes, world)
    job = two_nodes.run(["squeue", "-h", "-o", "%i", "-u", "alice"]).stdout.split()[0]
    two_nodes.run(["scancel", "--signal=TERM", f"{job}.0"], user="alice")
    for pid in movers(world):
        os.kill(pid, signal.SIGCONT)
    code, out, err = end(process)
    assert code == 75, err
    assert json.loads(out.splitlines()[-1])["event"] == "failed"
    assert world.published() == []
    done = drain(two_nodes, world)
    assert done.returncode == 0, done.stderr
    assert world.leftovers() == []
    world.check()


def test_a_lease_of_a_node_that_is_gone_is_waited_out(two_nodes, world):
    Path(lease.path(world.run_dir, ITERATION)).write_text('{"token": "t", "host": "node7", "pid": 1, "owner": "job-8"}')
    os.chmod(lease.path(world.run_dir, ITERATION), 0o666)
    done = drain(two_nodes, world)
    assert done.returncode == 0, done.stderr
    world.check()


def test_a_user_drains_by_hand_from_inside_the_job(two_nodes, world):
    program = [sys.executable, "-m", "slurm_resil", "ckpt", "drain", "--json"]
    places = ["--run-dir", world.run_dir, "--job-dir", str(two_nodes.bb / JOB)]
    env = {"PYTHONPATH": str(ROOT), "SLURM_RESIL_WORLD_SIZE": "4", "SLURM_RESIL_RANKS_PER_NODE": "2"}
    argv = ["salloc", "-N2", "--ntasks-per-node=2", "--exclusive", *program, *places]
    done = two_nodes.run(argv, user="alice", check=False, timeout_s=90, env=env)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["written_bytes"]) == 2
    world.check()
