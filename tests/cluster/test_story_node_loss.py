"""A node is lost with its burst buffer: a spare takes its place, and the run goes on from the last checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import TINY, References, assert_identical, assert_nobody_gathered, cluster, rng
from story import Job, Story

pytestmark = [pytest.mark.story, pytest.mark.cluster, pytest.mark.torch, pytest.mark.mpi]


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with cluster(nodes=7, spares=3) as made:
        yield made


def namespaces(story: Story, node: str) -> tuple[str, ...]:
    """What tells a node from another one of this host."""
    text = story.sandbox.run(
        ["readlink", *(f"/proc/self/ns/{kind}" for kind in ("net", "mnt", "uts"))], node=node
    ).stdout
    return tuple(text.split())


def check_replaced(story: Story, job: Job, victim: str, before: list[str]) -> None:
    """The spare is in, the lost node is out and marked, and the others are the same."""
    after = story.node_names(job.nodes)
    spares = set(story.sandbox.nodes[4:])
    assert victim not in after
    assert set(before) - {victim} == set(before) & set(after)
    assert set(after) - set(before) <= spares
    record = story.node(victim)
    assert "DRAIN" in record["State"]
    assert record["Reason"].startswith("resil")
    assert len({namespaces(story, node) for node in after}) == len(after)


@pytest.mark.parametrize("how", ["kill", "cut", "batch_host"])
def test_node_loss(story: Story, references: References, how: str) -> None:
    draw = rng(how)
    training = ("--iterations", "120", *TINY)
    reference = references.get(training)
    arguments = [*training, "--pace", "0.4", "--digest", "digest"]
    job = story.submit(how, arguments, options=["--time=30"], env={"SLURM_RESIL_EVERY": "10"}, script=without_every)
    story.wait("a published checkpoint", lambda: bool(story.durable(job)), timeout_s=120, job=job)
    begin = job.iteration
    beyond = draw.randint(2, 8)
    story.wait("the iteration of the fault", lambda: job.iteration >= begin + beyond, timeout_s=60, job=job)
    before = story.node_names(job.nodes)
    batch_host = story.record(job)["BatchHost"]
    victim = batch_host if how == "batch_host" else draw.choice([name for name in before if name != batch_host])
    if how == "cut":
        story.sandbox.node_cut(victim)  # no connection is reset: silence is all that the others notice
    else:
        story.sandbox.node_kill(victim)
        story.sandbox.node_wipe(victim)
    try:
        story.wait_training(job, starts=2, timeout_s=150)
        check_replaced(story, job, victim, before)
        if how == "cut":
            story.sandbox.node_kill(victim)
            story.sandbox.node_wipe(victim)
        story.wait_end(job, timeout_s=150)
    finally:
        story.sandbox.node_restore(victim, resume=True)  # for the next one

    assert len(job.starts) == 2
    assert job.starts[1] > 0
    assert job.lost(1) > 0
    assert story.durable(job)[-1] == 120  # saves went on after it
    assert_identical(job, reference)
    assert_nobody_gathered(job)


def without_every(text: str) -> str:
    """The batch script, with the interval left to the environment."""
    return text.replace("--every 25 ", "")
