"""A more important job takes the nodes: the job saves within the grace time, is requeued and goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import DATA, TINY, References, assert_identical, assert_nobody_gathered, assert_ranks_differ, cluster, rng
from story import Job, Story

pytestmark = [pytest.mark.story, pytest.mark.cluster, pytest.mark.torch, pytest.mark.mpi]


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with cluster(nodes=4, spares=0, grace_time_s=15) as made:
        yield made


def preempt(story: Story, job: Job) -> None:
    """Let somebody else's job take all nodes for a moment, and wait until ours trains again."""
    starts = len(job.starts)
    command = [
        "sbatch",
        "--parsable",
        "-p",
        "urgent",
        "-N4",
        "--exclusive",
        "--time=2",
        "--output=/dev/null",
        "--wrap",
        "hostname",
    ]
    other = int(story.sandbox.run(command, user="bob").stdout)
    story.wait_training(job, starts=starts + 1, timeout_s=150)
    record = story.scontrol("-o", "show", "job", str(other))
    assert "JobState=COMPLETED" in record
    assert f"NodeList={job.nodes} " in record  # it really had our nodes


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_preemption(story: Story, references: References, mode: str) -> None:
    training = ["--iterations", "90", *TINY, *(["--fsdp2"] if mode == "fsdp2" else [])]
    reference = references.get(training)
    job = story.submit(mode, [*training, "--pace", "0.4", "--digest", "digest"], options=["--time=20"])
    story.wait_training(job, starts=1, beyond=rng(mode).randint(3, 40))
    preempt(story, job)
    story.wait_end(job, timeout_s=120)

    assert "PREEMPTED" not in [state for _, state, _, _ in job.slurm]
    assert job.restarts == 1
    assert len(job.starts) == 2
    assert job.lost(1) == 0  # it was saved within the grace time, not found again later
    assert_identical(job, reference)
    assert_ranks_differ(reference)
    assert_nobody_gathered(job)


def test_tensors_may_change_right_after_a_save(story: Story, references: References) -> None:
    """S4: the state at the call is saved, though all of it is overwritten the moment the call returns."""
    training = ("--iterations", "40", *TINY)
    reference = references.get(training)
    job = story.submit(
        "scribble",
        [*training, "--pace", "0.2", "--digest", "digest"],
        options=["--time=20"],
        env={"SLURM_RESIL_EVERY": "5"},
        files=[DATA / "scribble.py"],
        script=lambda text: text.replace("train_gpt.py", "scribble.py").replace("--every 25 ", ""),
    )
    story.wait_training(job, starts=1, beyond=rng("scribble").randint(6, 25))
    preempt(story, job)
    story.wait_end(job, timeout_s=120)
    assert_identical(job, reference)
