"""The recovery engine as a process of its own, on a real cluster of four nodes and a spare.

Jobs here have no launcher: what happens to them is the engine's doing or Slurm's own.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines import SPARE, Engine, Job, wait_for

from slurm_resil.sandbox import Sandbox

pytestmark = pytest.mark.cluster


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


def test_a_task_of_an_array_goes_on_alone(engine: Engine) -> None:
    """The task that started last has the id of the whole array."""
    engine.start()
    job = engine.submit("alice", "--array=0-1")
    listing = ["squeue", "-h", "-r", "-j", str(job.id), "-t", "RUNNING", "-o", "%A"]
    ids = wait_for("both tasks", lambda: len(found := engine.sandbox.run(listing).stdout.split()) == 2 and found)
    (other,) = [Job(engine.sandbox, int(name), job.dir) for name in ids if int(name) != job.id]
    mine, others = job.nodes, other.nodes
    assert engine.continue_job("alice", job, reason="walltime")[0] == 0
    incident = engine.wait_end(job)
    assert incident["outcome"] == f"running on {','.join(mine)}"
    assert (job.seen, job.nodes) == (("RUNNING", 1), mine)
    assert (other.seen, other.nodes) == (("RUNNING", 0), others)
    assert not engine.guards()


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
    wait_for("requeuehold", lambda: job.seen[0] == "PENDING")
    time.sleep(6)  # or it forgets that the job was started before, and with it the count of restarts
    engine.sandbox.kill_slurmctld()
    # the process that we started waits for the one in the cluster's namespaces, which has stopped
    subprocess.run(["pkill", "-CONT", "-f", f"engine run .*{engine.work}/engine.db"], check=True)
    try:
        time.sleep(3)  # some of its questions fail
    finally:
        engine.sandbox.restart_slurmctld()
    engine.wait_end(job, 120)
    job.wait_start(2)
    assert job.seen == ("RUNNING", 1)
    assert job.nodes == ["node1", "node2"]
    assert len(engine.of(job)) == 1
