"""What the story tests share: undisturbed runs to compare with, and checks on what a run left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from story import RANKS, Job, Reference, Story, compare

from slurm_resil.format.manifest import DrainedManifest

DATA = Path(__file__).resolve().parents[1] / "data"
SEED = int(os.environ.get("SLURM_RESIL_TEST_SEED", "20"))
TINY = ("--model-size", "tiny", "--batch", "2")
MIB = 1 << 20


def rng(name: str) -> random.Random:
    """A generator of one test's own: the same faults for the same ``SLURM_RESIL_TEST_SEED``."""
    return random.Random(f"{SEED} {name}")


class References:
    """Undisturbed runs, each trained once."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._done: dict[tuple[str, ...], Reference] = {}

    def get(self, arguments: Sequence[str]) -> Reference:
        """Start training with these arguments, or return the run that did; it goes on beside the job under test."""
        key = tuple(arguments)
        if key not in self._done:
            self._done[key] = Reference(self.work / str(len(self._done)), key, nice=5)
        return self._done[key]

    def close(self) -> None:
        """End what still runs."""
        for run in self._done.values():
            run.close()


@contextlib.contextmanager
def cluster(**options: object) -> Iterator[Story]:
    """A cluster with everything on it, in a directory that is short and that other users can reach."""
    work = Path(tempfile.mkdtemp(prefix="story-"))
    work.chmod(0o755)
    story = None
    try:
        story = Story(work, **options)  # type: ignore[arg-type] -- passed through
        story.start()
        yield story
    finally:
        if story is not None:
            story.close()
        shutil.rmtree(work)


def losses(log: Path) -> dict[int, set[str]]:
    """Every loss that was printed for each iteration; a rerun must print the same one."""
    found: dict[int, set[str]] = {}
    for line in log.read_text(errors="replace").splitlines():
        words = line.split()
        if "iteration" in words and "loss" in words:
            number = int(words[words.index("iteration") + 1])
            found.setdefault(number, set()).add(words[words.index("loss") + 1])
    return found


def assert_identical(job: Job, reference: Reference, *, digest: str = "digest") -> None:
    """Every rank's whole final state, and every loss on the way, is that of the undisturbed run."""
    reference.wait(timeout_s=200)
    assert compare(reference.digests, job.directory / digest) == []
    expected = losses(reference.log)
    assert expected
    assert losses(job.log) == expected


def assert_ranks_differ(reference: Reference) -> None:
    """The comparison means something: what is private to a rank differs between ranks."""
    parts = [json.loads(Path(f"{reference.digests}.{rank}").read_text())["parts"] for rank in range(RANKS)]
    private = ("loader.position", "loader.generator", "randomness.torch", "model.input_norm.running_mean")
    for name in private:
        assert len({part[name] for part in parts}) == RANKS, f"{name} is the same on several ranks"


def assert_nobody_gathered(job: Job) -> list[DrainedManifest]:
    """No process wrote more than 1.5 times its share of any published file; return the manifests."""
    manifests = [DrainedManifest.load(str(path)) for path in sorted(job.directory.glob(".slurm-resil/*/ckpt-*.json"))]
    assert manifests, f"nothing was published below {job.directory}/.slurm-resil"
    for manifest in manifests:
        data = sum(item.nbytes for item in manifest.items)
        written = manifest.written_bytes
        assert len(written) == RANKS  # one mover per node, one rank per node
        assert sum(written) >= data
        assert max(written) <= 1.5 * sum(written) / len(written), f"iteration {manifest.iteration}: {written}"
    return manifests


def assert_memory_bounded(job: Job, reference: Reference, state_bytes: int) -> None:
    """A rank needs at most three slots' pages and 48 MiB more than a rank that does no checkpointing.

    Args:
        job: The finished job.
        reference: The undisturbed run.
        state_bytes: Size of one rank's state, bytes.
    """
    for rank in range(RANKS):
        peaks = [
            json.loads(Path(f"{path}.{rank}").read_text())["peak_rss_bytes"]
            for path in (reference.digests, job.directory / "digest")
        ]
        assert peaks[1] - peaks[0] <= 3 * state_bytes + 48 * MIB, f"rank {rank}: {peaks}"
