"""A job that needs longer than its time limit saves before the limit, is requeued and goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import (
    TINY,
    References,
    assert_identical,
    assert_memory_bounded,
    assert_nobody_gathered,
    assert_ranks_differ,
    cluster,
)
from story import Story

pytestmark = [pytest.mark.story, pytest.mark.cluster, pytest.mark.torch, pytest.mark.mpi]


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with cluster(nodes=4, spares=0) as made:
        yield made


def test_walltime(story: Story, references: References) -> None:
    training = ("--iterations", "110", "--batch", "2")
    reference = references.get(training)
    job = story.submit("walltime", [*training, "--pace", "0.5", "--digest", "digest"], options=["--time=1"])
    story.wait("Slurm to start the job again", lambda: job.restarts == 1, timeout_s=120, job=job)
    story.wait_end(job, timeout_s=120)

    states = [state for _, state, _, _ in job.slurm]
    assert "TIMEOUT" not in states
    assert len(job.starts) == job.restarts + 1
    assert all(start > 0 for start in job.starts[1:])
    assert [job.lost(number) for number in range(1, len(job.starts))] == [0] * job.restarts
    assert len({nodes for _, state, _, nodes in job.slurm if state == "RUNNING"}) == 1  # its own nodes again
    assert_identical(job, reference)
    assert_ranks_differ(reference)
    manifests = assert_nobody_gathered(job)
    state_bytes = max(sum(item.nbytes for item in manifest.items) for manifest in manifests)
    assert_memory_bounded(job, reference, state_bytes)


def test_the_limit_is_followed_when_it_changes(story: Story, references: References) -> None:
    """D5: an admin halves what is left; the job must not rely on the end time it once read."""
    training = ("--iterations", "220", *TINY)  # at this pace longer than the new limit, however fast it starts
    reference = references.get(training)
    job = story.submit("shorter", [*training, "--pace", "0.4", "--digest", "digest"], options=["--time=20"])
    story.wait_training(job, starts=1, beyond=5)
    story.scontrol("update", f"JobId={job.id}", "TimeLimit=1")
    story.wait("Slurm to start the job again", lambda: job.restarts >= 1, timeout_s=120, job=job)
    story.scontrol("update", f"JobId={job.id}", "TimeLimit=20")
    story.wait_end(job, timeout_s=120)
    assert "TIMEOUT" not in [state for _, state, _, _ in job.slurm]
    assert job.lost(1) == 0
    assert_identical(job, reference)
