"""The launcher, an agent or slurmctld is killed at random moments, again and again; the run's bits stay the same."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from harness import TINY, References, assert_identical, cluster, rng
from story import USER, Job, Story

pytestmark = [pytest.mark.story, pytest.mark.cluster, pytest.mark.torch, pytest.mark.mpi]
VICTIMS = ("launcher", "agent", "slurmctld")
PATTERNS = {"launcher": "slurm-resil run", "agent": "slurm_resil agent"}


@pytest.fixture
def story() -> Iterator[Story]:
    with cluster(nodes=4, spares=0) as made:
        yield made


def pids(story: Story, node: str, pattern: str) -> list[str]:
    """Processes of a node, which has a PID namespace of its own, by command line."""
    return story.sandbox.run(["pgrep", "-f", pattern], node=node, check=False).stdout.split()


def strike(story: Story, job: Job, victim: str, draw: random.Random) -> None:
    """Kill one of them."""
    if victim == "slurmctld":
        story.sandbox.kill_slurmctld()
        story.sandbox.restart_slurmctld()
        return
    node = story.record(job)["BatchHost"] if victim == "launcher" else draw.choice(story.node_names(job.nodes))
    found = pids(story, node, PATTERNS[victim])
    assert found, f"no {victim} runs on {node}"
    story.sandbox.run(["kill", "-KILL", *found], node=node, check=False)  # one of them may have ended meanwhile


def carry_on(story: Story, job: Job, *, timeout_s: float) -> None:
    """Wait until the job trains again. One whose launcher is dead has failed: its owner requeues it."""
    at = job.iteration

    def moving() -> bool:
        if job.state == "FAILED":
            story.sandbox.run(["scontrol", "requeue", str(job.id)], user=USER, check=False)
            return False
        return job.running and (job.iteration > at or len(job.starts) > starts)

    starts = len(job.starts)
    story.wait("the training to go on", moving, timeout_s=timeout_s)


def soak(story: Story, references: References, cycles: int, iterations: int) -> None:
    draw = rng(f"soak {cycles}")
    training = ("--iterations", str(iterations), *TINY)
    reference = references.get(training)
    job = story.submit("soak", [*training, "--pace", "0.3", "--digest", "digest"], options=["--time=120"])
    # every kind comes once before any comes twice
    victims = [victim for _ in range(cycles) for victim in draw.sample(VICTIMS, len(VICTIMS))][:cycles]
    for victim in victims:
        story.wait_training(job, starts=len(job.starts) or 1, beyond=1)
        target = job.iteration + draw.randint(1, 15)
        story.wait(f"iteration {target}", lambda target=target: job.iteration >= target, timeout_s=120, job=job)
        strike(story, job, victim, draw)
        carry_on(story, job, timeout_s=150)
    story.wait_end(job, timeout_s=120 + iterations)
    assert_identical(job, reference)


def test_two_cycles(story: Story, references: References) -> None:
    soak(story, references, 2, 110)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_twenty_cycles(story: Story, references: References) -> None:
    soak(story, references, 20, 900)
