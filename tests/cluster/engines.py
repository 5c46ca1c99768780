"""An engine as a process of its own, and jobs that have no launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_resil.sandbox import Sandbox
from slurm_resil.sandbox.spec import CONTROLLER_ADDRESS

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = f"{CONTROLLER_ADDRESS}:7322"
SPARE = "node5"
ASK = """
import json, sys
from slurm_resil.recovery.client import EngineClient
print(EngineClient(sys.argv[1])._ask(json.loads(sys.argv[2])))
"""
SCRIPT = """#!/bin/bash
echo "$SLURM_RESTART_COUNT $SLURM_JOB_NODELIST" >> starts
exec sleep 600
"""


def wait_for(what: str, check: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.2)
    return found


@dataclass
class Job:
    sandbox: Sandbox
    id: int
    dir: Path

    def column(self, name: str) -> str:
        """What squeue says; of an array with this id it shows all tasks."""
        argv = ["squeue", "-h", "--states=all", "-r", "-j", str(self.id), "-O", f"JobID:|,{name}:|"]
        rows = [row.split("|") for row in self.sandbox.run(argv, check=False).stdout.splitlines()]
        return next((row[1].strip() for row in rows if row[0] == str(self.id)), "")

    @property
    def seen(self) -> tuple[str, int]:
        return self.column("State"), int(self.column("RestartCnt") or 0)

    @property
    def nodes(self) -> list[str]:
        return self.sandbox.run(["scontrol", "show", "hostnames", self.column("NodeList")]).stdout.split()

    @property
    def starts(self) -> list[str]:
        path = self.dir / "starts"
        return path.read_text().splitlines() if path.exists() else []

    def wait_start(self, number: int, timeout_s: float = 60.0) -> None:
        wait_for(f"start {number} of job {self.id}", lambda: len(self.starts) >= number, timeout_s)
        wait_for(f"job {self.id} running", lambda: self.column("State") == "RUNNING")


@dataclass
class Engine:
    """The engine's process, and what it wrote down."""

    sandbox: Sandbox
    work: Path
    process: subprocess.Popen[bytes] | None = None
    jobs: list[Job] = field(default_factory=list)

    def start(self, *, mode: str = "act", fault: str = "", spares: str = "spares") -> None:
        assert self.process is None
        argv = [sys.executable, "-m", "slurm_resil", "engine", "run", "--listen", ADDRESS, "--mode", mode]
        argv += ["--db", str(self.work / "engine.db"), "--spares", spares]
        env = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "SLURM_RESIL_FAULT": fault}
        inside = self.sandbox.command(argv, user="root", env=env)
        with (self.work / "engine.log").open("ab") as log:
            self.process = subprocess.Popen(
                inside.argv, env=inside.env, cwd=inside.cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        host, port = ADDRESS.split(":")
        probe = ["bash", "-c", f"exec 3<>/dev/tcp/{host}/{port}"]

        def listens() -> bool:
            assert self.process is not None
            return self.process.poll() is not None or self.sandbox.run(probe, check=False).returncode == 0

        wait_for("the engine to listen", listens)

    def wait_killed(self, timeout_s: float = 60.0) -> None:
        assert self.process is not None
        assert self.process.wait(timeout_s) in (-signal.SIGKILL, 128 + signal.SIGKILL)
        self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(15)
                raise
            finally:
                self.process = None

    def ask(self, user: str, **request: Any) -> tuple[int, str]:
        argv = [sys.executable, "-c", ASK, ADDRESS, json.dumps(request)]
        env = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        done = self.sandbox.run(argv, user=user, env=env, check=False)
        return done.returncode, done.stdout + done.stderr

    def continue_job(self, user: str, job: Job, *bad: str, reason: str = "node_loss") -> tuple[int, str]:
        return self.ask(user, ask="continue", job=job.id, bad_nodes=list(bad), reason=reason, level="durable")

    def incidents(self) -> list[dict[str, Any]]:
        argv = [sys.executable, "-m", "slurm_resil", "engine", "incidents", "--json", "--db", self.work / "engine.db"]
        done = subprocess.run(
            argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True, timeout=30
        )
        return list(json.loads(done.stdout)["incidents"])

    def of(self, job: Job) -> list[dict[str, Any]]:
        return [entry for entry in self.incidents() if entry["job"] == job.id]

    def wait_end(self, job: Job, timeout_s: float = 60.0) -> dict[str, Any]:
        found = wait_for(
            f"the end of the incident of job {job.id}",
            lambda: [entry for entry in self.of(job) if entry["outcome"]],
            timeout_s,
        )
        assert len(self.of(job)) == 1
        return dict(found[0])

    def submit(self, user: str = "alice", *options: str, nodes: int = 2) -> Job:
        directory = self.sandbox.pfs / user / f"engine-{time.monotonic_ns()}"
        make = 'mkdir -p -- "$1" && cat > "$1/job.sh"'
        self.sandbox.run(["bash", "-c", make, "bash", str(directory)], user=user, stdin=SCRIPT)
        argv = ["sbatch", "--parsable", "--exclusive", f"-N{nodes}", "--output=/dev/null", *options, "job.sh"]
        done = self.sandbox.run(argv, user=user, cwd=directory)
        job = Job(self.sandbox, int(done.stdout), directory)
        self.jobs.append(job)
        job.wait_start(1)
        return job

    def node(self, name: str) -> tuple[str, str]:
        """State and reason."""
        line = self.sandbox.run(["scontrol", "-o", "show", "node", name]).stdout
        state = line.partition(" State=")[2].partition(" ")[0]
        return state, line.partition(" Reason=")[2].strip()

    def guards(self) -> bool:
        return "ReservationName=resil_" in self.sandbox.run(["scontrol", "-o", "show", "reservation"]).stdout

    def close(self) -> None:
        """End the process and the jobs, and make all nodes usable again."""
        try:
            self.stop()
        finally:
            ids = [str(job.id) for job in self.jobs]
            if ids:
                self.sandbox.run(["scancel", *ids], check=False)
            for name in self.sandbox.nodes:
                if not self.sandbox.node_alive(name) or "DRAIN" in self.node(name)[0]:
                    self.sandbox.node_restore(name, resume=True)
            wait_for("idle nodes", lambda: all(s.startswith(("idle", "reserved")) for s in self.states()), 60)

    def states(self) -> list[str]:
        return list(self.sandbox.node_states().values())
