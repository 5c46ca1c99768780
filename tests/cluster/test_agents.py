"""Agents on nodes with addresses of their own, as an ordinary user, proven by the cluster's MUNGE; no launcher."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resil.sandbox import Sandbox

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).resolve().parents[2]
STEP = f"srun --overlap -N2 --ntasks-per-node=1 {sys.executable} {ROOT}/tests/cluster/agents_job.py"
SCRIPT = f"""#!/bin/bash
export PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1 SLURM_RESIL_PREFIX=$PWD/runs
export SLURM_RESIL_RANKS_PER_NODE=1 SLURM_RESIL_WORLD_SIZE=2
{STEP} agent &
{STEP} rank
wait
"""
ASK = """
import os, sys
from slurm_resil.agent.asking import ask
from slurm_resil.agent.uplink import LeaderPlace
run, job = sys.argv[1], int(sys.argv[2])
print(ask(LeaderPlace(run_dir=run, job_id=job, attempt=0), level="local", timeout_s=20))
"""


def wait_for(what: str, check: Callable[[], Any], timeout_s: float = 40.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.1)
    return found


class Job:
    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.dir = sandbox.pfs / f"agents-{time.monotonic_ns()}"
        self.dir.mkdir()
        self.dir.chmod(0o777)
        script = self.dir / "job.sh"
        script.write_text(SCRIPT)
        script.chmod(0o755)
        submitted = sandbox.run(
            ["sbatch", "--parsable", "-N2", f"--chdir={self.dir}", "--output=out.txt", str(script)], user="alice"
        )
        self.id = int(submitted.stdout)
        self.run_dir = self.dir / "runs" / str(self.id)

    @property
    def lines(self) -> list[dict[str, Any]]:
        path = self.dir / "out.txt"
        found = []
        for line in path.read_text().splitlines() if path.exists() else ():
            if line.startswith("{"):
                found.append(json.loads(line))
        return found

    def event(self, name: str, timeout_s: float = 40.0) -> dict[str, Any]:
        def seen() -> dict[str, Any] | None:
            return next((line for line in self.lines if line.get("event") == name), None)

        return wait_for(f"event {name}", seen, timeout_s)

    def ask(self, user: str, *, node: str | None = None) -> str:
        done = self.sandbox.run(
            ["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", ASK, str(self.run_dir), str(self.id)],
            user=user,
            node=node,
            check=False,
        )
        return str(done.stdout + done.stderr)

    def end(self) -> None:
        self.sandbox.run(["scancel", "-s", "KILL", str(self.id)], check=False)


@pytest.fixture(scope="module")
def sandbox(cluster_factory: Callable[..., Sandbox]) -> Iterator[Sandbox]:
    made = cluster_factory(nodes=2)
    yield made
    made.down()


@pytest.fixture
def job(sandbox: Sandbox) -> Iterator[Job]:
    made = Job(sandbox)
    yield made
    print(json.dumps(made.lines, indent=1))
    made.end()


def test_they_agree_over_the_network_and_obey_their_user_only(job: Job) -> None:
    job.event("Restored")
    record = json.loads((job.run_dir / "leader.json").read_text())
    assert record["auth"] == "munge"
    assert not record["address"].startswith(("127.", "0."))
    hosts = [line["host"] for line in job.lines if "host" in line]
    assert record["address"].split(":")[0] in hosts
    assert len(set(hosts)) == 2
    assert "ok=True" in job.ask("alice")
    for stranger in ("bob", "root"):
        answer = job.ask(stranger)
        assert "NotPermittedError" in answer, answer
    (job.run_dir / "please-stop").touch()
    wait_for("the end", lambda: len([line for line in job.lines if "stopped" in line]) == 2)
    assert len({line["stopped"] for line in job.lines if "stopped" in line}) == 1
    wait_for("the agents", lambda: len([line for line in job.lines if line.get("event") == "agent_down"]) == 2)


def test_a_node_behind_a_cut_link_is_lost_within_seconds(sandbox: Sandbox, job: Job) -> None:
    job.event("Restored")
    leader = json.loads((job.run_dir / "leader.json").read_text())["address"].split(":")[0]
    node = next(line["node"] for line in job.lines if line.get("host") not in (None, leader))
    sandbox.node_cut(node)
    began = time.monotonic()
    try:
        lost = job.event("NodeLost", 15)
        assert lost["node"] == node
        assert "silent" in lost["why"]
        assert time.monotonic() - began < 9
    finally:
        sandbox.node_heal(node)
