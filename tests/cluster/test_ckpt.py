"""``ckpt`` as a user calls it on the login node, of a job that holds nodes: by steps of the user's own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resil.core import layout, paths
from slurm_resil.launch import records
from slurm_resil.sandbox import Sandbox
from slurm_resil.sandbox.procs import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "drain"))

from owners import own
from shardworld import ITERATION, World, build

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sandbox(cluster_factory) -> Iterator[Sandbox]:
    pytest.importorskip("mpi4py")
    made = cluster_factory(nodes=3)
    yield made
    made.down()


class Held:
    """A job that holds three nodes with sealed shards, as a launcher would have written it down."""

    def __init__(self, sandbox: Sandbox, world: World, job: int) -> None:
        self.sandbox, self.world, self.job = sandbox, world, job

    def ckpt(self, *arguments: str, user: str = "alice") -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "slurm_resil", "ckpt", *arguments, "--run-dir", self.world.run_dir]
        return self.sandbox.run(argv, user=user, check=False, timeout_s=90, env={"PYTHONPATH": str(ROOT)})

    def ls(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """All that is said, and of the one iteration."""
        done = self.ckpt("ls", "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        (row,) = said["checkpoints"]
        return said, row

    def flip(self, path: str) -> None:
        with open(path, "r+b") as file:
            file.seek(99)
            byte = file.read(1)[0]
            file.seek(99)
            file.write(bytes([byte ^ 1]))


@pytest.fixture
def held(sandbox: Sandbox) -> Iterator[Held]:
    for node in sandbox.nodes:
        if not sandbox.node_alive(node):
            sandbox.node_restore(node, resume=True)
    wait_until("idle nodes", lambda: set(sandbox.node_states().values()) == {"idle"}, timeout_s=120)
    job = int(
        sandbox.run(["sbatch", "--parsable", "-N3", "--output=/dev/null", "--wrap=sleep 600"], user="alice").stdout
    )
    root = sandbox.pfs / f"ckpt-{job}"
    root.mkdir()
    made = build(root, ranks=6, per_node=2, scale=20)
    where = sandbox.bb / f"job-{job}"
    made.job_dirs = [str(sandbox.node_path(node, where)) for node in sandbox.nodes]
    made.seal()
    attempt = records.Attempt(made.run_dir, 0, job_id=job, restarts=0, nodes=sandbox.nodes, job_dir=str(where))
    attempt.update(levels={"local": ITERATION, "protected": 0, "durable": 0})
    layout.save(made.run_dir, layout.Layout(nodes=sandbox.nodes, ranks_per_node=2), 0)
    for top in (root, *map(Path, made.job_dirs)):
        own(sandbox, top)
    wait_until(
        "running", lambda: " R" in sandbox.run(["squeue", "-h", "-j", str(job), "-o", " %t"]).stdout, timeout_s=30
    )
    yield Held(sandbox, made, job)
    sandbox.run(["scancel", str(job)], check=False)
    for top in (root, *map(Path, made.job_dirs)):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(top)


def encode(held: Held) -> None:
    argv = ["srun", f"--jobid={held.job}", "--overlap", "-N3", "-n3", "--ntasks-per-node=1", "--mpi=pmi2"]
    argv += [sys.executable, "-m", "slurm_resil", "mover", "encode", "--scheme=xor", "--run-dir", held.world.run_dir]
    argv += ["--job-dir", str(held.sandbox.bb / f"job-{held.job}")]
    held.sandbox.run(argv, user="alice", timeout_s=90, env={"PYTHONPATH": str(ROOT)})


def test_all_tiers_from_the_login_node(held: Held) -> None:
    sandbox, world = held.sandbox, held.world
    said, row = held.ls()
    assert (said["job"], said["unseen"], set(said["nodes"])) == (held.job, {}, set(sandbox.nodes))
    assert (row["state"], row["local_ranks"], row["scheme"]) == ("LOCAL", list(range(6)), None)
    encode(held)
    _, row = held.ls()
    assert (row["state"], row["scheme"]) == ("PROTECTED", "xor")
    assert all(one["protects"] and len(one["ranks"]) == 2 for one in row["nodes"].values())
    # a parity that was damaged is named with its node, and counts as one more loss
    parity = paths.parity(world.job_dir(1), ITERATION, 1)
    held.flip(parity)
    done = held.ckpt("verify", "--json")
    (result,) = json.loads(done.stdout)["checkpoints"]
    assert done.returncode == 65 and [flaw.split(": ")[0] for flaw in result["flaws"]] == ["node2"], result
    for name in os.listdir(world.job_dir(2)):  # the directory itself is the prolog's
        shutil.rmtree(os.path.join(world.job_dir(2), name))
    _, row = held.ls()
    assert (row["state"], row["rebuildable"], row["local_ranks"]) == ("PROTECTED", True, [0, 1, 2, 3])
    done = held.ckpt("rebuild", "--json")
    last = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, last["event"], last["exit_code"]) == (65, "failed", 65)
    assert "lost 2 of its nodes" in last["error"] and "it covers 1" in last["error"] and "node2" in last["error"]
    held.flip(parity)
    done = held.ckpt("rebuild", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["nodes"] == ["node3"]
    done = held.ckpt("ls", "--verify")
    assert done.returncode == 0 and "sound" in done.stdout and "node[1-3] (+parity)" in done.stdout
    assert held.ckpt("verify", "--deep").returncode == 0
    # leftovers of an encode that was killed go from all nodes
    for node in range(3):
        left = Path(paths.parity(world.job_dir(node), ITERATION - 1, node))
        left.write_bytes(b"x" * 9000)
        own(sandbox, left.parent)
    done = held.ckpt("prune", "--redundancy", "--yes", "--json")
    found = json.loads(done.stdout)["redundancy"]
    assert done.returncode == 0 and [len(one["files"]) for one in found.values()] == [1, 1, 1]
    assert not any(os.path.exists(paths.parity(world.job_dir(node), ITERATION - 1, node)) for node in range(3))
    done = held.ckpt("drain", "--json")
    assert done.returncode == 0, done.stderr
    assert held.ls()[1]["state"] == "DURABLE"
    world.check()


def test_what_cannot_be_seen_is_said(held: Held) -> None:
    encode(held)
    done = held.ckpt("ls", user="bob")
    assert done.returncode == 0 and "only its owner can look" in done.stdout
    held.sandbox.node_kill("node3")
    said, row = held.ls()
    assert list(said["unseen"]) == ["node3"], said["unseen"]
    assert (row["state"], row["local_ranks"]) == ("LOCAL", [0, 1, 2, 3])
    done = held.ckpt("verify", "--json")
    assert done.returncode == 69 and json.loads(done.stdout)["unseen"].keys() == {"node3"}, done.stderr
    held.sandbox.run(["scancel", str(held.job)])
    wait_until("over", lambda: held.ckpt("ls", "--json").stdout.count("RUNNING") == 0, timeout_s=60)
    done = held.ckpt("ls")
    assert done.returncode == 0 and "not seen: node[1-3]" in done.stdout
    done = held.ckpt("rebuild")
    assert done.returncode == 2 and "no job of this run is on nodes now" in done.stderr
