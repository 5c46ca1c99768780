"""Which shards to protect, found by all movers together."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass

from slurm_resil.comm.base import Communicator, agreed, allgather_json
from slurm_resil.core import pins
from slurm_resil.core.errors import DataError, ResilError, TryAgainError
from slurm_resil.format import sealed
from slurm_resil.format.manifest import ShardManifest
from slurm_resil.format.sealed import Found


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A checkpoint that all ranks have sealed, and this node's shards of it."""

    run_id: str
    job_id: int
    attempt: int
    iteration: int
    world_size: int
    manifests: tuple[ShardManifest, ...]


def sealed_by_all(
    comm: Communicator, job_dir: str, run_dir: str, iteration: int | None, stack: contextlib.ExitStack
) -> Sealed:
    """Find the shards of an iteration, or of the newest that all ranks have sealed, and pin them. Collective.

    Args:
        comm: Movers.
        job_dir: Job's directory in this node's burst buffer.
        run_dir: Run's directory; its last part is the run's name.
        iteration: Which; None: the newest.
        stack: Holds the pins.

    Raises:
        DataError: Shards are damaged, do not fit, or are of another run.
        TryAgainError: Not all ranks have sealed.
    """
    if iteration is not None:
        return _find(comm, job_dir, run_dir, iteration, stack)
    with agreed(comm, f"listing {job_dir}"):
        here = sorted(sealed.listed(job_dir))
    first: ResilError | None = None
    for one in sorted({i for part in allgather_json(comm, here) for i in part}, reverse=True):
        try:
            return _find(comm, job_dir, run_dir, one, stack)
        except (TryAgainError, DataError) as error:  # the same on every rank
            first = first or error
    raise first or TryAgainError(f"no iteration is sealed in {job_dir} on any node", mend="save a checkpoint first")


def _find(comm: Communicator, job_dir: str, run_dir: str, iteration: int, stack: contextlib.ExitStack) -> Sealed:
    good: list[ShardManifest] = []
    bad: list[str] = []
    with agreed(comm, f"reading the manifests in {job_dir}"):
        if os.path.isdir(job_dir):
            stack.enter_context(pins.hold(job_dir, iteration))
            good, bad = sealed.load(job_dir, iteration)
    gathered = allgather_json(comm, {"found": [asdict(Found.of(one, comm.rank)) for one in good], "bad": bad})
    found = [Found(**entry) for part in gathered for entry in part["found"]]
    chosen = sealed.choose(found, [text for part in gathered for text in part["bad"]], iteration)
    any_one = next(iter(chosen.values()))
    if os.path.basename(os.path.abspath(run_dir)) != any_one.run_id:
        raise DataError(
            f"the shards in {job_dir} are of run {any_one.run_id}, not of the run of {run_dir}",
            mend="give the directory of the run that they are of",
        )
    return Sealed(
        run_id=any_one.run_id,
        job_id=any_one.job_id,
        attempt=any_one.attempt,
        iteration=iteration,
        world_size=any_one.world_size,
        manifests=tuple(one for one in good if chosen[one.rank] == Found.of(one, comm.rank)),
    )
