"""`slurm-resil run` in batch jobs of an ordinary user on a real cluster; the state is a few bytes, without torch.

What happened is checked from outside: Slurm's record, and digests that are computed here again.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from launched import SCRIPT, Job, expected, jobs, wait_for

from slurm_resil.launch.rules import Rules
from slurm_resil.recovery.actions import SETTLE_S
from slurm_resil.sandbox import Sandbox

pytestmark = [pytest.mark.cluster, pytest.mark.story]


@pytest.fixture(scope="module")
def sandbox(cluster_factory: Callable[..., Sandbox]) -> Iterator[Sandbox]:
    made = cluster_factory(nodes=4, grace_time_s=12)
    yield made
    made.down()


@pytest.fixture
def start(sandbox: Sandbox) -> Iterator[Callable[..., Job]]:
    with jobs(sandbox) as make:
        yield make


def preempt(sandbox: Sandbox, seconds: int = 1) -> None:
    argv = ["sbatch", "-p", "urgent", "-N4", "--exclusive", "--time=1", "--output=/dev/null", "--wrap"]
    sandbox.run([*argv, f"sleep {seconds}"], user="bob")


def test_two_ranks_on_each_of_three_nodes(start):
    job = start("--iterations", "40")
    job.assert_complete(40)
    places = job.starts(0)
    assert [places[rank]["node"] for rank in range(6)] == [f"node{n}" for n in (1, 1, 2, 2, 3, 3)]


def test_a_failing_rank_is_named_and_all_start_again_in_the_allocation(start):
    job = start("--iterations", "40", "--fail", "3:25:7:once")
    job.assert_complete(40)
    assert job.record["Restarts"] == "0"
    (ended, _) = job.named("ranks_ended")
    assert (ended["rank"], ended["node"], ended["code"]) == (3, "node2", 7)
    assert {line["start"] for line in job.starts(0, 1).values()} == {20}
    began = next(event["time"] for event in job.events if event["event"] == "ranks_ended")
    again = job.named("restore")[1]["time"]
    assert again - began < 8


def test_the_jobs_exit_code_is_the_ranks_verdict(start):
    job = start("--iterations", "40", "--fail", "4:25:-11", launcher="--max-restarts 0")
    record = job.wait_state("FAILED")
    assert record["ExitCode"] == "139:0"
    assert "rank 4 on node3 was killed by SIGSEGV" in job.out


def test_preempted_it_saves_requeues_itself_and_goes_on(sandbox, start):
    job = start("--iterations", "240")
    job.wait_event("durable")
    preempt(sandbox)
    requeued = job.wait_event("requeued")
    assert requeued["time"] - job.named("notice")[0]["time"] < 10
    (stop,) = job.named("stop")
    assert job.named("requeue_intent")[0]["level"] == "DURABLE"
    job.hurry(1)
    job.assert_complete(240)
    # saved at the notice: nothing is trained twice, whatever the tier
    assert {line["start"] for line in job.starts(1).values()} == {stop["iteration"]}
    assert {line["stopped"] for line in job.lines if "stopped" in line} == {stop["iteration"]}
    assert job.record["Restarts"] == "1"


def test_a_kill_that_is_faster_than_scontrol_ends_the_launcher_all_the_same(sandbox, start):
    """Slurm kills the attempt while the launcher still waits for the answer to its request; no other kill follows."""
    slow = sandbox.pfs / "slow"
    slow.mkdir(exist_ok=True)
    scontrol = slow / "scontrol"
    real = shutil.which("scontrol")
    scontrol.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys, time\n"
        f"code = subprocess.run([{real!r}, *sys.argv[1:]]).returncode\n"
        "time.sleep(4 if 'requeue' in sys.argv else 0)\n"
        "sys.exit(code)\n"
    )
    scontrol.chmod(0o755)
    job = start("--iterations", "240", script=SCRIPT.replace("PATH={bin}", f"PATH={slow}:{{bin}}"))
    job.wait_event("durable")
    preempt(sandbox)
    requeued = job.wait_event("requeued")
    finished = job.wait_event("finished")
    assert finished["time"] - requeued["time"] < Rules().takeover_s / 2
    job.hurry(1)
    job.assert_complete(240)
    assert job.record["Restarts"] == "1"


@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_lost_node_is_replaced_and_no_rank_changes_its_place(sandbox, start, how):
    job = start("--iterations", "300")
    job.wait_event("durable", 2)
    victim = "node2"
    began = time.time()
    if how == "cut":
        sandbox.node_cut(victim)
    else:
        sandbox.node_kill(victim)
        sandbox.node_wipe(victim)
    lost = job.wait_event("node_lost", timeout_s=20)
    assert lost["nodes"] == [victim]
    assert lost["time"] - began < 10  # slurmctld itself takes half a minute
    requeued = job.wait_event("requeued")
    assert requeued["time"] - lost["time"] < 5
    assert job.record["ExcNodeList"] == victim
    # another part does this; before the other nodes are done with the job, Slurm starts it on top of its own remains
    wait_for("the other nodes", lambda: job.record["NodeList"] == victim, 30)
    time.sleep(SETTLE_S)  # Slurm's backfill may start it at once, and not within the second of the kill: see hurry
    sandbox.run(["scontrol", "update", f"NodeName={victim}", "State=DOWN", "Reason=test"])
    job.hurry(1)
    job.assert_complete(300)
    before, after = job.starts(0), job.starts(1)
    assert {rank: line["node"] for rank, line in after.items()} == {
        rank: "node4" if line["node"] == victim else line["node"] for rank, line in before.items()
    }
    for rank, line in after.items():
        ((tier, iteration),) = line["loaded"]
        assert iteration == lost["durable"]
        # the others may have used the slot for a newer one, which only they have
        assert tier == "drained" if rank in (2, 3) else tier in ("local", "drained")


def test_an_agent_that_dies_is_started_again_beside_the_running_ranks(sandbox, start):
    job = start("--iterations", "240")
    job.wait_event("durable")
    found = sandbox.run(["pgrep", "-f", "^[^ ]*python -m slurm_resil agent"], node="node2").stdout.split()
    assert found  # also one of an earlier job, which a cut link has left behind
    sandbox.run(["kill", "-KILL", *found], node="node2")
    lost = job.wait_event("agent_lost")
    assert lost["node"] == "node2"
    sealed = len(job.named("sealed"))
    job.wait_event("sealed", sealed + 2)  # checkpoints go on
    job.assert_complete(240)
    assert len(job.named("cycle_start")) == 1


def test_the_srun_of_the_agents_may_die_too(sandbox, start):
    job = start("--iterations", "160")
    job.wait_event("durable")
    found = sandbox.run(["pgrep", "-f", "slurm_resil agent"], node="node1").stdout.split()
    sandbox.run(["kill", "-KILL", *found], node="node1", check=False)
    job.wait_event("agent_lost")
    job.assert_complete(160)
    assert len(job.named("cycle_start")) == 1
    assert {event["node"] for event in job.named("agent_lost")} == {"node1"}


def test_d6_what_cannot_be_requeued_says_so_at_once_and_ends_with_75(sandbox, start):
    job = start("--iterations", "400", sbatch=("--no-requeue",))
    job.wait_event("durable")
    assert "WARNING: this job cannot be requeued" in job.out
    preempt(sandbox)
    record = job.wait_state("FAILED", "PREEMPTED")
    assert record["ExitCode"].startswith("75:")
    finished = job.wait_event("finished")
    assert "add `#SBATCH --requeue`" in finished["words"]
    assert finished["durable"] == job.named("stop")[0]["iteration"]


def test_a_cancelled_job_ends_within_kill_wait_and_does_not_come_back(sandbox, start):
    job = start("--iterations", "400")
    job.wait_event("durable")
    sandbox.run(["scancel", str(job.id)], user="alice")
    began = time.monotonic()
    record = job.wait_state("CANCELLED", timeout_s=30)
    assert time.monotonic() - began < 15
    assert record["Restarts"] == "0"
    assert not job.named("requeued")


def test_d9_attempts_that_gain_nothing_end_in_a_held_job_with_the_reason(sandbox, start):
    job = start("--iterations", "400", "--deaf-from", "1")
    job.wait_event("restore")
    for number in range(1, 4):
        sandbox.run(["scontrol", "requeue", str(job.id)], user="alice")
        job.hurry(number)
        if number < 3:
            job.wait_event("restore", number + 1)
    job.wait_event("held")
    record = job.wait_state("PENDING", timeout_s=40)
    assert record["Reason"] in ("JobHeldUser", "job_requeued_in_held_state", "JobHoldMaxRequeue")
    assert "3 attempts in a row gained no iteration" in record["Comment"]


def test_d10_tasks_of_an_array_with_a_name_of_any_kind(sandbox, start):
    """Each task is a job and a run of its own; a name that looks like Slurm's record is a name."""
    name = "ünï x JobState=FAILED Restarts=9 BatchFlag=0 Requeue=0\nJobId=1"
    job = start("--iterations", "20", sbatch=("-N1", "--array=0-1", f"--job-name={name}", "--output=out-%a.txt"))
    outs = [job.dir / f"out-{task}.txt" for task in (0, 1)]

    def ended() -> bool:
        time.sleep(0.3)
        listing = sandbox.run(["squeue", "-h", "-j", str(job.id), "-t", "PENDING,RUNNING,COMPLETING"], check=False)
        return not listing.stdout.strip()

    wait_for("both tasks to end", ended, 90)
    runs = sorted(job.dir.glob(".slurm-resil/*/events.jsonl"))
    assert len(runs) == 2
    for path in runs:
        events = [json.loads(line) for line in path.read_text().splitlines()]
        assert (events[-1]["event"], events[-1]["code"], events[-1]["durable"]) == ("finished", 0, 20)
    for out in outs:
        text = out.read_text()
        assert "WARNING" not in text  # such as that it cannot be requeued
        digests = [json.loads(line.partition(": ")[2])["digest"] for line in text.splitlines() if '"digest"' in line]
        assert sorted(digests) == sorted(expected(rank, 20) for rank in range(2))


def test_a_burst_buffer_that_the_user_cannot_write_is_one_clear_error(sandbox, start):
    job = start("--iterations", "10", sbatch=(f"--export=ALL,SLURM_RESIL_BB_ROOT={sandbox.bb}/none",))
    record = job.wait_state("FAILED")
    assert record["ExitCode"] == "78:0"
    assert f"cannot use the burst buffer {sandbox.bb}/none" in job.out


def test_dry_run_starts_nothing(sandbox, start):
    job = start(launcher="--dry-run --ranks-per-node 1")
    job.wait_state("COMPLETED")
    assert "node_rank 2: node3" in job.out
    assert "--nodelist=node1,node2,node3" in job.out
    assert not job.run_dir.exists()
