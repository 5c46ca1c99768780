"""Nodes are lost with their burst buffers: what the redundancy covers goes on from the newest protected checkpoint.

Real launcher, agents, movers and slots on a real cluster; the state is a small array, and drains are slowed down, so
that what is durable is older than what is protected. At the end every rank's state is compared with that of a training
without faults.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from ClusterShell.NodeSet import NodeSet
from launched import FAULT, Job, jobs, wait_for

from slurm_resil.core.schemes import Scheme
from slurm_resil.recovery.actions import SETTLE_S
from slurm_resil.sandbox import Sandbox

pytestmark = [pytest.mark.cluster, pytest.mark.story, pytest.mark.torch, pytest.mark.mpi]
NODES = 4
NAMES = [f"node{number}" for number in range(1, NODES + 3)]  # two of them are spares
SLOW = 48 << 10  # bytes/s: a drain takes some seconds, and so does the pause after it
ITERATIONS = 320
SCRIPT = """#!/bin/bash
export PYTHONPATH={fault}/movesite:{root} PYTHONDONTWRITEBYTECODE=1 PATH={bin}:$PATH OMP_NUM_THREADS=1
export SLURM_RESIL_REDUNDANCY={scheme}
python -m slurm_resil run {launcher} --every 10 -- python {train} --real {options}
"""


@pytest.fixture(scope="module")
def sandbox(cluster_factory: Callable[..., Sandbox]) -> Iterator[Sandbox]:
    pytest.importorskip("mpi4py")
    made = cluster_factory(nodes=len(NAMES), grace_time_s=12)
    yield made
    made.down()


class Lossy:
    """A job whose nodes are lost.

    Args:
        sandbox: Where it runs.
        make: Starts it.
        scheme: Redundancy.
    """

    def __init__(self, sandbox: Sandbox, make: Callable[..., Job], scheme: str) -> None:
        self.sandbox, self.attempt = sandbox, 0
        self.job = make(
            *("--iterations", str(ITERATIONS), "--pace", "0.1"),
            launcher=f"--cap {SLOW}",
            sbatch=(f"-N{NODES}", "--ntasks-per-node=1"),
            script=SCRIPT.replace("{scheme}", scheme).replace("{fault}", str(FAULT)),
        )

    def fault(self, kind: str, text: str) -> None:
        """Have the movers of a kind that begin from now on stop somewhere, or (empty) not."""
        path = self.job.run_dir / f"fault-{kind}"
        path.write_text(text)
        if not text:
            path.unlink()

    def slurm(self, node: str, state: str) -> None:
        """Let Slurm give a node to nobody, or again."""
        self.sandbox.run(["scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test"])

    def lose(self, victims: Sequence[str], *, spares: int) -> dict[str, Any]:
        """Nodes die with all that they have, and the job starts again; returns what the launcher said of it."""
        job = self.job
        for node in NAMES[NODES + spares :]:
            self.slurm(node, "DRAIN")  # as many spares as are needed: the other nodes stay
        for victim in victims:
            self.sandbox.node_kill(victim)
            self.sandbox.node_wipe(victim)
        lost = job.wait_event("node_lost", self.attempt + 1, timeout_s=30)
        self.attempt += 1
        job.wait_event("requeued", self.attempt)
        # another part does this: before the other nodes are done with it, Slurm starts it on top of its own remains
        wait_for("the other nodes", lambda: self.nodes() <= set(victims), 30)
        time.sleep(SETTLE_S)  # nor within the second of the kill: slurmd would take it for what was killed
        for victim in victims:
            self.slurm(victim, "DOWN")
        job.hurry(self.attempt)
        # not before it runs: a node that is still busy with its end would be replaced as well
        for node in NAMES[NODES + spares :]:
            self.slurm(node, "RESUME")
        return lost

    def nodes(self) -> set[str]:
        """Nodes that Slurm counts as the job's."""
        return set(NodeSet(self.job.record["NodeList"].replace("(null)", "")))

    @property
    def protected(self) -> int:
        """Newest iteration of which the launcher has said that it is protected."""
        return max((event["iteration"] for event in self.job.named("protected")), default=0)

    def wait_hanging_encode(self) -> None:
        """Wait until an encode has been at it for much longer than one takes."""

        def hangs() -> bool:
            time.sleep(0.2)
            begun = self.job.named("encode_start")[-1]
            return begun["iteration"] > self.protected and time.time() - begun["time"] > 3.0

        wait_for("an encode that hangs", hangs)

    def restored(self) -> dict[int, tuple[str, int]]:
        """What each rank of the newest attempt has loaded, and from where."""
        attempt = self.attempt
        wait_for(f"all ranks\n{self.job.out}", lambda: len(self.job.starts(attempt)) == NODES, 90)
        found = self.job.starts(attempt).items()
        return {rank: tuple(line["loaded"][-1]) if line["loaded"] else ("fresh", 0) for rank, line in found}

    def check(self, *, covered: bool, lost: dict[str, Any], newest: int) -> None:
        """It went on from where it should, said so, and comes to the right end."""
        job = self.job
        found = {(tier, iteration) for tier, iteration in map(tuple, self.restored().values())}
        if covered:
            assert (lost["level"], lost["iteration"]) == ("protected", newest)
            assert found == {("local", newest)}
            assert job.named("rebuilt")[-1]["iteration"] == newest
        else:
            assert (lost["level"], lost["iteration"]) == ("durable", lost["durable"])
            assert {iteration for _, iteration in found} == {lost["durable"]}
            assert not job.named("rebuilt")
            failed = job.named("rebuild_failed")
            assert bool(failed) == bool(newest)
            assert all("covers" in event["words"] for event in failed)
            assert all(f"iteration {event['iteration']} could not be rebuilt" in job.out for event in failed)
        before, after = job.starts(self.attempt - 1), job.starts(self.attempt)
        kept = {rank: line["node"] for rank, line in before.items() if line["node"] not in lost["nodes"]}
        assert {rank: after[rank]["node"] for rank in kept} == kept  # who is not affected stays in place
        job.assert_complete(ITERATIONS, ranks=NODES, skips=True)


@pytest.fixture
def start(sandbox: Sandbox) -> Iterator[Callable[[str], Lossy]]:
    with jobs(sandbox) as make:
        yield lambda scheme: Lossy(sandbox, make, scheme)


MOMENTS = ("before", "during encode", "after", "during rebuild", "during drain")
CELLS = [(scheme, lost, moment) for scheme in ("partner", "xor", "rs:2") for lost in (1, 2) for moment in MOMENTS]
DIAGONAL = [
    ("xor", 1, "before"),
    ("partner", 1, "during encode"),
    ("xor", 1, "after"),
    ("rs:2", 2, "during rebuild"),
    ("xor", 2, "during drain"),
]


@pytest.mark.parametrize(
    ("scheme", "lost", "moment"),
    [pytest.param(*cell, marks=() if cell in DIAGONAL else pytest.mark.full) for cell in CELLS],
)
def test_what_is_covered_goes_on_from_the_newest_protected_checkpoint(
    start: Callable[[str], Lossy], scheme: str, lost: int, moment: str
) -> None:
    run = start(scheme)
    job = run.job
    victims = ["node2", "node3"][:lost]
    if moment == "before":
        # nothing comes to be protected
        job.wait_event("attempt_start")
        run.fault("encode", "encode.open:hang")
        job.wait_event("sealed", 3)
    elif moment == "during encode":
        job.wait_event("protected", 2)
        run.fault("encode", "encode.publish:hang@1")
        run.wait_hanging_encode()
    elif moment == "during drain":
        job.wait_event("durable")
        job.wait_event("drain_start", 2)
        job.wait_event("protected", len(job.named("protected")) + 2)
    else:
        job.wait_event("protected", 3)
    newest = run.protected
    if moment != "during rebuild":
        if "encode" in moment or moment == "before":
            run.fault("encode", "")  # those that hang go on hanging
        seen = run.lose(victims, spares=lost)
        run.check(covered=lost <= Scheme.parse(scheme).losses and bool(newest), lost=seen, newest=newest)
        return
    # with one node it is the spare that dies next, with two another node
    run.fault("rebuild", "rebuild.publish:hang")
    run.lose(["node2"], spares=1)
    newest = run.protected
    job.wait_event("rebuild", timeout_s=60)
    time.sleep(2.0)  # up to where it hangs
    run.fault("rebuild", "")
    second = run.lose(["node5" if lost == 1 else "node3"], spares=2)
    assert second["iteration"] in (0, newest, second["durable"])  # nothing of it was restored yet
    found = set(run.restored().values())
    covered = lost <= Scheme.parse(scheme).losses
    assert found == {("local", newest)} if covered else {iteration for _, iteration in found} == {second["durable"]}
    job.assert_complete(ITERATIONS, ranks=NODES, skips=True)
