"""Drains under way when the end comes, when storage hangs, and when a person does not want them: real movers.

Real launcher, agents, movers and slots on a real cluster; the state is a small array, and the cap makes a drain take
long.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from launched import FAULT, ROOT, Job, jobs, wait_for

from slurm_resil.sandbox import Sandbox

pytestmark = [pytest.mark.cluster, pytest.mark.story, pytest.mark.torch, pytest.mark.mpi]
NODES = 2
SLOW = 2000  # bytes/s: a drain takes most of a minute
SCRIPT = """#!/bin/bash
{exports}
export PYTHONPATH={fault}/movesite:{root} PYTHONDONTWRITEBYTECODE=1 PATH={bin}:$PATH OMP_NUM_THREADS=1
python -m slurm_resil run {launcher} --every 10 -- python {train} --real {options}
"""


@pytest.fixture(scope="module")
def sandbox(cluster_factory: Callable[..., Sandbox]) -> Iterator[Sandbox]:
    pytest.importorskip("mpi4py")
    made = cluster_factory(nodes=NODES, grace_time_s=12)
    yield made
    made.down()


@pytest.fixture
def start(sandbox: Sandbox) -> Iterator[Callable[..., Job]]:
    with jobs(sandbox) as make:

        def one(*options: str, launcher: str = f"--cap {SLOW}", sbatch: tuple[str, ...] = (), exports: str = "") -> Job:
            script = SCRIPT.replace("{fault}", str(FAULT)).replace("{exports}", exports)
            return make(
                *options, launcher=launcher, sbatch=(f"-N{NODES}", "--ntasks-per-node=1", *sbatch), script=script
            )

        yield one


def ask(sandbox: Sandbox, job: Job, command: str, *options: str) -> str:
    argv = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "slurm_resil", "job", command, str(job.id)]
    return sandbox.run([*argv, "--run-dir", str(job.run_dir), *options], user="alice").stdout


def status(sandbox: Sandbox, job: Job, *, as_json: bool = True) -> Any:
    out = ask(sandbox, job, "status", *(["--json"] if as_json else []))
    return json.loads(out)["drain"] if as_json else out


def test_at_a_deadline_the_same_mover_goes_on_without_the_cap(sandbox, start):
    """The ranks do not come to a stop, so what is drained is what there is."""
    lead = "--export=ALL,SLURM_RESIL_LEAD=100s"
    job = start("--iterations", "400", "--deaf-from", "15", sbatch=("--time=10", lead))
    begun = job.wait_event("drain_start")
    assert (begun["iteration"], begun["capped"]) == (10, True)
    wait_for("progress", lambda: (status(sandbox, job) or {}).get("phase") == "write", 30)
    shown = status(sandbox, job, as_json=False)
    assert "drain: iteration 10: write" in shown and "at most 2.0 KiB/s" in shown
    sandbox.run(["scontrol", "update", f"JobId={job.id}", "TimeLimit=2"])
    notice = job.wait_event("notice", timeout_s=60)
    assert notice["kind"] == "walltime"
    hurried = job.wait_event("drain_hurried", timeout_s=20)
    durable = job.wait_event("durable", timeout_s=40)  # it waits a while for the checkpoint that does not come
    assert not job.named("drain_hangs")  # that is no hanging
    assert hurried["iteration"] == durable["iteration"] == 10
    assert len(job.named("drain_start")) == 1 and not job.named("drain_cancelled")
    wait_for("its status", lambda: status(sandbox, job)["state"] == "durable", 20)  # it is written beside the events
    # at the end of its two minutes, of which more are left the sooner the drain was done
    job.wait_event("requeued", timeout_s=100)
    assert job.named("requeue_intent")[-1]["level"] == "DURABLE"


def test_at_the_end_of_the_training_too(start):
    job = start("--iterations", "10")
    job.assert_complete(10, ranks=NODES)
    assert [event["finish"] for event in job.named("drain_hurried")] == [True]
    assert len(job.named("drain_start")) == 1 and not job.named("drain_cancelled")


@pytest.mark.parametrize("seconds", [10, pytest.param(60, marks=pytest.mark.full)])
def test_storage_that_hangs_is_shown_and_waited_for(sandbox, start, seconds):
    iterations = 150 + 8 * seconds  # a drain of an older checkpoint gives way to that of the last one
    job = start("--iterations", str(iterations), "--pace", "0.2", launcher="")
    job.wait_event("attempt_start")
    (job.run_dir / "fault-drain").write_text(f"drain.write:hang{seconds}")
    hangs = job.wait_event("drain_hangs", timeout_s=60)
    (job.run_dir / "fault-drain").unlink()
    iteration = hangs["iteration"]
    assert hangs["node"].startswith("node") and hangs["doing"].startswith("writing")
    words = f"storage hangs on {hangs['node']} since"
    wait_for(words, lambda: words in status(sandbox, job, as_json=False), seconds - 4)
    assert "storage hangs on" in job.out

    def went_on() -> bool:
        time.sleep(0.2)
        published = list(job.run_dir.glob(f"ckpt-{iteration:010d}.*"))
        over = bool(job.named("drain_went_on"))
        assert over or not published
        return over

    wait_for("storage that answers again", went_on, seconds + 30)
    assert job.wait_event("durable")["iteration"] == iteration
    assert len([event for event in job.named("drain_start") if event["iteration"] == iteration]) == 1
    job.assert_complete(iterations, ranks=NODES)


def test_a_person_cancels_a_drain_and_the_next_one_is_not_touched(sandbox, start):
    job = start("--iterations", "150", "--pace", "0.2")
    first = job.wait_event("drain_start")["iteration"]
    wait_for("progress", lambda: (status(sandbox, job) or {}).get("phase") == "write", 30)
    said = json.loads(ask(sandbox, job, "cancel-drain", "--json"))
    assert said == {"job": job.id, "iteration": first, "drain": "cancelled"}
    assert job.wait_event("drain_declined")["iteration"] == first
    assert job.wait_event("drain_start", 2)["iteration"] > first
    job.assert_complete(150, ranks=NODES)
    assert not job.named("drain_failed")


def test_checkpoints_get_the_schemes_and_drains_of_the_list(start):
    """Of two nodes rs:2 can cover the loss of one; which scheme a checkpoint gets goes by its number."""
    every = {"rs": 3, "drain": 4}
    exports = f"export SLURM_RESIL_REDUNDANCY='xor,rs:2/{every['rs']},drain/{every['drain']}'"
    job = start("--iterations", "120", "--pace", "0.4", launcher="", exports=exports)
    job.assert_complete(120, ranks=NODES)
    number = {event["iteration"]: place for place, event in enumerate(job.named("sealed"))}
    protected = {event["iteration"]: event["scheme"] for event in job.named("protected")}
    assert len(protected) >= 6 and not job.named("encode_failed")
    due = False  # one whose turn was missed leaves the stronger scheme to the next
    for iteration, place in number.items():
        due = due or place % every["rs"] == 0
        if iteration in protected:
            assert protected[iteration] == ("rs" if due else "xor"), (iteration, place)
            due = False
    capped = [number[event["iteration"]] for event in job.named("drain_start") if event["capped"]]
    # the first one that was ready after one was due
    assert capped[0] == 0 and all(a // every["drain"] < b // every["drain"] for a, b in pairwise(capped)), capped
    assert job.events[-1]["durable"] == 120
    assert "rs covers" in job.out or "rs is to cover" in job.out  # and people are told
