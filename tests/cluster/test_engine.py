"""The recovery engine as a process of its own, on a real cluster of four nodes and a spare.

Jobs here have no launcher: what happens to them is the engine's doing or Slurm's own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slurm_resil.sandbox import Sandbox
from slurm_resil.sandbox.spec import CONTROLLER_ADDRESS

pytestmark = pytest.mark.cluster
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
        argv = ["squeue", "-h", "--states=all", "-j", str(self.id), "-O", f"{name}:|"]
        return self.sandbox.run(argv, check=False).stdout.strip().rstrip("|")

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


@pytest.fixture(scope="module")
def sandbox(cluster_factory: Callable[..., Sandbox]) -> Iterator[Sandbox]:
    made = cluster_factory(nodes=5, spares=1)
    yield made
    made.down()


@pytest.fixture
def engine(sandbox: Sandbox, tmp_path: Path) -> Iterator[Engine]:
    made = Engine(sandbox, tmp_path)
    try:
        yield made
    finally:
        log = tmp_path / "engine.log"
        print(log.read_text() if log.exists() else "no log")
        print(json.dumps(made.incidents(), indent=1) if (tmp_path / "engine.db").exists() else "no database")
        made.close()


def assert_untouched(engine: Engine, job: Job) -> None:
    assert job.seen == ("RUNNING", 0)
    assert [engine.node(name) for name in job.nodes] == [("ALLOCATED", "")] * len(job.nodes)
    assert engine.of(job) == []
    assert not engine.guards()


def test_who_may_not_ask_for_what(engine: Engine) -> None:
    engine.start()
    job = engine.submit("alice")
    bad = job.nodes[1]
    # what the engine is there for: a user cannot do it
    argv = ["scontrol", "update", f"NodeName={bad}", "State=DRAIN", "Reason=resil: mine"]
    assert engine.sandbox.run(argv, user="alice", check=False).returncode != 0
    for stranger in ("bob", "root"):
        for code, words in (
            engine.continue_job(stranger, job),
            engine.continue_job(stranger, job, bad),
            engine.ask(stranger, ask="register", job=job.id),
        ):
            assert code != 0
            assert "NotPermittedError" in words
            assert "does not belong" in words
    for names, why in (([bad], "answers"), (["node4"], "no node of job"), (["node4; x"], "no node of job")):
        code, words = engine.continue_job("alice", job, *names)
        assert code != 0
        assert "NotPermittedError" in words
        assert why in words
    for request in (
        {"ask": "drain", "node": bad},
        {"ask": "continue", "job": f"{job.id}", "bad_nodes": [], "reason": "x", "level": "x"},
        {"ask": "continue", "job": -job.id, "bad_nodes": [], "reason": "x", "level": "x"},
        {"ask": "continue", "job": 10**6, "bad_nodes": [], "reason": "x", "level": "x"},
        {"ask": "continue", "job": job.id, "bad_nodes": bad, "reason": "x", "level": "x"},
        {"ask": "continue", "job": job.id, "bad_nodes": [7], "reason": "x", "level": "x"},
        {"ask": "continue", "job": job.id, "bad_nodes": [], "reason": "x State=DOWN", "level": "x"},
        {"ask": "register", "job": True},
        {},
    ):
        code, words = engine.ask("alice", **request)
        assert code != 0, request
        assert "NotPermittedError" in words, (request, words)
    assert_untouched(engine, job)


def test_a_name_that_looks_like_slurms_word_gives_nobody_another_ones_job(engine: Engine) -> None:
    engine.start()
    uid = engine.sandbox.run(["id", "-u", "bob"]).stdout.strip()
    name = f"x UserId=bob({uid}) JobState=RUNNING Restarts=99 Requeue=1 NodeList=node[1-4]\nJobId=1 UserId=bob({uid})"
    job = engine.submit("alice", "-J", name, "--comment", name, "-A", name)
    scontrol = engine.sandbox.run(["scontrol", "-o", "show", "job", str(job.id)]).stdout
    assert scontrol.index(f"UserId=bob({uid})") < scontrol.index("UserId=alice(")  # it would deceive
    code, words = engine.continue_job("bob", job)
    assert code != 0
    assert "does not belong" in words
    others = sorted({"node1", "node2", "node3", "node4"} - set(job.nodes))
    code, words = engine.continue_job("alice", job, others[0])
    assert code != 0
    assert "no node of job" in words
    assert_untouched(engine, job)
    # and it does its owner no harm either
    assert engine.continue_job("alice", job, reason="requeue")[0] == 0
    engine.wait_end(job)
    assert job.seen == ("RUNNING", 1)
    assert engine.of(job)[0]["restarts"] == 0


def test_a_job_goes_on_with_the_spare(engine: Engine) -> None:
    engine.start()
    job = engine.submit("alice", "--exclude=node4")
    good, bad = job.nodes
    engine.sandbox.node_kill(bad)
    began = time.monotonic()
    code, words = engine.continue_job("alice", job, bad)
    assert code == 0, words
    assert engine.continue_job("alice", job, bad)[0] in (0, 1)  # at once again: the same one, or no longer running
    incident = engine.wait_end(job)
    assert time.monotonic() - began < 30
    job.wait_start(2)
    assert job.seen == ("RUNNING", 1)
    assert sorted(job.nodes) == sorted([good, SPARE])
    assert (incident["bad"], incident["good"], incident["spare"]) == ([bad], [good], [SPARE])
    assert {line["result"] for line in incident["trail"]} == {"done"}
    state, reason = engine.node(bad)
    assert "DRAIN" in state
    assert reason.startswith(f"resil: job {job.id}, node_loss")
    assert engine.node(good) == ("ALLOCATED", "")
    assert not engine.guards()
    assert len(job.starts) == 2
    excluded = engine.sandbox.run(["squeue", "-h", "-j", str(job.id), "-o", "%x"]).stdout
    assert {"node4", bad} == set(engine.sandbox.run(["scontrol", "show", "hostnames", excluded.strip()]).stdout.split())


def test_d12_nobody_takes_the_good_nodes_meanwhile(engine: Engine) -> None:
    """A job of somebody else that waits for exactly these nodes, and is older, does not get them."""
    engine.start()
    job = engine.submit("alice", nodes=4)
    nodes = job.nodes
    argv = ["sbatch", "--parsable", "--exclusive", f"-N{len(nodes)}", "--output=/dev/null", "--wrap=sleep 600"]
    other = Job(engine.sandbox, int(engine.sandbox.run(argv, user="bob").stdout), job.dir)
    engine.jobs.append(other)
    assert other.column("State") == "PENDING"
    assert engine.continue_job("alice", job, reason="walltime")[0] == 0
    incident = engine.wait_end(job)
    assert incident["outcome"] == f"running on {','.join(nodes)}"
    assert (job.seen, job.nodes) == (("RUNNING", 1), nodes)
    assert other.column("State") == "PENDING"


def test_without_a_pool_slurm_chooses_a_node(engine: Engine) -> None:
    engine.start(spares="mistyped")
    job = engine.submit("alice")
    bad = job.nodes[1]
    engine.sandbox.node_kill(bad)
    assert engine.continue_job("alice", job, bad)[0] == 0
    incident = engine.wait_end(job)
    job.wait_start(2)
    assert job.seen == ("RUNNING", 1)
    assert bad not in job.nodes
    assert SPARE not in job.nodes  # it is kept for whoever has configured it
    assert "there is no reservation mistyped" in [line["result"] for line in incident["trail"]]
    # and a job that needs no spare gets its own nodes back
    nodes = job.nodes
    assert engine.continue_job("alice", job, reason="walltime")[0] == 0
    wait_for("the second end", lambda: len(engine.of(job)) == 2 and engine.of(job)[1]["outcome"], 60)
    assert (job.seen, job.nodes) == (("RUNNING", 2), nodes)


@pytest.mark.parametrize("state", ["DRAIN", "DOWN"])
def test_what_a_person_has_taken_out_is_left_alone(engine: Engine, state: str) -> None:
    engine.start()
    job = engine.submit("alice")
    good, bad = job.nodes
    update = ["scontrol", "update", f"NodeName={bad}", f"State={state}", "Reason=new board, ask Carol"]
    engine.sandbox.node_kill(bad)
    if state == "DRAIN":
        engine.sandbox.run(update)
        assert engine.continue_job("alice", job, bad)[0] == 0
    else:  # Slurm requeues the job at once
        assert engine.ask("alice", ask="register", job=job.id)[0] == 0
        engine.sandbox.run(update)
    if state == "DRAIN":
        # Slurm itself calls the node down when it has been silent for long enough: until then the job cannot go on
        wait_for("the node down", lambda: "DOWN" in engine.node(bad)[0], 90)
    incident = engine.wait_end(job, 90)
    assert job.seen == ("RUNNING", 1)
    assert sorted(job.nodes) == sorted([good, SPARE])
    left, reason = engine.node(bad)
    assert state in left
    assert reason.startswith("new board, ask Carol")
    assert [line for line in incident["trail"] if bad in line["action"] and "NodeName" in line["action"]] == []


POINTS = [f"engine.{when}:kill@{number}" for number in range(1, 7) for when in ("begun", "acted")]


@pytest.mark.parametrize("point", ["engine.accepted:kill", *POINTS, "engine.ended:kill"])
def test_killed_anywhere_it_continues_the_job_once(engine: Engine, point: str) -> None:
    engine.start(fault=point)
    job = engine.submit("alice")
    nodes = job.nodes
    engine.continue_job("alice", job)  # with accepted:kill it hears nothing
    engine.wait_killed()
    engine.start()
    incident = engine.wait_end(job)
    job.wait_start(2)
    assert incident["outcome"] == f"running on {','.join(nodes)}"
    assert job.seen == ("RUNNING", 1)
    assert job.nodes == nodes
    assert [line.split()[0] for line in job.starts] in (["0", "1"], ["1"]) or len(job.starts) == 2
    assert not engine.guards()
    assert engine.sandbox.run(["squeue", "-h", "-j", str(job.id), "-O", "Reservation:|"]).stdout.strip() in (
        "|",
        "(null)|",
    )


@pytest.mark.parametrize("number", [1, 2, 3, 4])  # drain, guard, requeuehold, down
def test_killed_while_it_takes_a_node_down(engine: Engine, number: int) -> None:
    engine.start(fault=f"engine.acted:kill@{number}")
    job = engine.submit("alice")
    good, bad = job.nodes
    engine.sandbox.node_kill(bad)
    engine.continue_job("alice", job, bad)
    engine.wait_killed()
    engine.start()
    engine.wait_end(job)
    job.wait_start(2)
    assert job.seen == ("RUNNING", 1)
    assert len(job.starts) == 2
    assert sorted(job.nodes) == sorted([good, SPARE])
    assert engine.node(bad)[1].startswith("resil:")


def test_observing_it_acts_on_nothing(engine: Engine) -> None:
    engine.start(fault="engine.accepted:kill")
    job = engine.submit("alice")
    engine.continue_job("alice", job)
    engine.wait_killed()
    engine.start(mode="observe")
    other = engine.submit("alice")
    bad = other.nodes[1]
    engine.sandbox.node_kill(bad)
    assert engine.ask("alice", ask="register", job=other.id)[0] == 0
    code, words = engine.continue_job("alice", other, bad)
    assert code != 0
    assert "ServiceError" in words
    assert "only observes" in words
    time.sleep(4)  # longer than a sweep: what it would do it would have begun
    assert job.seen == other.seen == ("RUNNING", 0)
    assert engine.of(other) == []
    assert [entry["trail"] for entry in engine.of(job)] == [[]]
    assert "DRAIN" not in engine.node(bad)[0]
    assert not engine.guards()


def test_a_registered_job_that_slurm_requeues_does_not_wait_two_minutes(engine: Engine) -> None:
    engine.start()
    job = engine.submit("alice")
    bad, good = job.nodes  # the batch host dies
    assert engine.ask("alice", ask="register", job=job.id)[0] == 0
    engine.stop()
    engine.start()  # it still knows
    engine.sandbox.node_kill(bad)
    wait_for("Slurm to notice", lambda: job.seen[0] != "RUNNING" or job.seen[1] == 1, 90)
    began = time.monotonic()
    incident = engine.wait_end(job, 60)
    job.wait_start(2)
    assert time.monotonic() - began < 40
    assert incident["reason"] == "node_loss"
    assert job.seen == ("RUNNING", 1)
    assert sorted(job.nodes) == sorted([good, SPARE])
    state, reason = engine.node(bad)
    assert "DRAIN" in state
    assert reason.startswith("resil:")
    # the next loss in the attempt that the engine did not start by request is one of its own
    assert engine.continue_job("alice", job, reason="requeue")[0] == 0
    wait_for("the second continuation", lambda: len(engine.of(job)) == 2 and engine.of(job)[1]["outcome"], 60)
    assert job.seen == ("RUNNING", 2)


def test_what_failed_before_the_job_was_stopped_can_be_asked_for_again(engine: Engine) -> None:
    engine.start(fault="engine.begun:raise@1")  # as a disk that is full would
    job = engine.submit("alice")
    assert engine.continue_job("alice", job)[0] == 0
    assert engine.wait_end(job)["outcome"].startswith("failed")
    assert job.seen == ("RUNNING", 0)
    assert engine.continue_job("alice", job)[0] == 0
    wait_for("the second try", lambda: engine.of(job)[0]["outcome"].startswith("running on"), 60)
    assert job.seen == ("RUNNING", 1)
    assert engine.of(job)[0]["tries"] == 2


def test_a_job_is_not_left_held_by_an_engine_that_fails(engine: Engine) -> None:
    engine.start(fault="engine.begun:raise@3")
    job = engine.submit("alice")
    assert engine.continue_job("alice", job)[0] == 0
    assert engine.wait_end(job)["outcome"].startswith("failed")
    assert job.column("State") == "PENDING"
    assert job.column("PriorityLong") != "0"
    assert not engine.guards()


def test_an_outage_of_slurmctld_in_the_middle_is_waited_for(engine: Engine) -> None:
    engine.start(fault="engine.acted:stop@2")
    job = engine.submit("alice")
    time.sleep(6)  # slurmctld writes its jobs down every five seconds; what it lost nobody can continue
    assert engine.continue_job("alice", job)[0] == 0
    assert engine.process is not None
    wait_for("requeuehold", lambda: job.seen[0] != "RUNNING")
    engine.sandbox.kill_slurmctld()
    # the process that we started waits for the one in the cluster's namespaces, which has stopped
    subprocess.run(["pkill", "-CONT", "-f", f"engine run .*{engine.work}/engine.db"], check=True)
    try:
        time.sleep(3)  # some of its questions fail
    finally:
        engine.sandbox.restart_slurmctld()
    engine.wait_end(job, 120)
    job.wait_start(2)  # whether it is counted as a restart depends on what slurmctld had written down
    assert job.nodes == ["node1", "node2"]
    assert len(engine.of(job)) == 1
