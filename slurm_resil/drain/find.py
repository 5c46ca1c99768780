"""Which checkpoint to drain, found by all movers together; and the marks of what is durable."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict

from slurm_resil.comm.base import Communicator, agreed, allgather_json
from slurm_resil.core import fsio, paths, pins
from slurm_resil.core.errors import DataError, ResilError, TryAgainError
from slurm_resil.format import sealed
from slurm_resil.format.manifest import DrainedManifest, ShardManifest
from slurm_resil.format.sealed import Found


def durable(run_dir: str, iteration: int) -> DrainedManifest | None:
    """Manifest of a drained checkpoint if it is there with its file at full length; None if it is not."""
    try:
        manifest = DrainedManifest.load(paths.drained_manifest(run_dir, iteration))
        size = os.stat(paths.drained(run_dir, iteration)).st_size
    except (FileNotFoundError, DataError):
        return None
    return manifest if size == manifest.file_bytes and manifest.iteration == iteration else None


def mark(run_dir: str, job_dir: str, iteration: int) -> None:
    """Write the durable mark of this node; without it the burst buffer is only kept longer.

    Older marks go once no shard of their iteration is here: the newest one says all that is asked of them.
    """
    with contextlib.suppress(OSError):
        path = paths.durable(job_dir, iteration)
        if os.path.isdir(job_dir) and not os.path.exists(path):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            body = {"iteration": iteration, "run_dir": run_dir, "file": paths.drained(run_dir, iteration)}
            fsio.write_json(path, body, mode=0o600, sync=False)
            here = sealed.listed(job_dir)
            for name in os.listdir(os.path.dirname(path)):
                other = paths.parse_durable(name)
                if other is not None and other < iteration and other not in here:
                    os.unlink(os.path.join(os.path.dirname(path), name))


class Finder:
    """Searches the shards of one checkpoint. Every method is collective.

    Args:
        comm: Movers.
        run_dir: Run's directory.
        job_dir: Job's directory in this node's burst buffer.
        stack: Holds the pins of the shards that were looked at.

    Attributes:
        own: Manifests of this node's shards of the checkpoint that was found.
    """

    def __init__(self, comm: Communicator, run_dir: str, job_dir: str, stack: contextlib.ExitStack) -> None:
        self._comm, self._run_dir, self._job_dir, self._stack = comm, run_dir, job_dir, stack
        self.own: list[ShardManifest] = []

    def search(self, iteration: int | None) -> DrainedManifest | None:
        """Find the shards of an iteration, or of the newest that all ranks have sealed.

        Returns:
            The published manifest if that iteration is durable already; None if there is work.

        Raises:
            DataError: Shards are damaged or do not fit.
            TryAgainError: Not all ranks have sealed.
        """
        if iteration is not None:
            there = self.durable(iteration)
            if there is None:
                self._find(iteration)
            return there
        with agreed(self._comm, f"listing {self._job_dir}"):
            here = sorted(sealed.listed(self._job_dir))
        first: ResilError | None = None
        for one in sorted({i for part in allgather_json(self._comm, here) for i in part}, reverse=True):
            there = self.durable(one)
            if there is not None:
                return there
            try:
                self._find(one)
            except (TryAgainError, DataError) as error:  # the same on every rank
                first = first or error
            else:
                return None
        if first is None:
            first = TryAgainError(
                f"no iteration is sealed in {self._job_dir} on any node", mend="save a checkpoint first"
            )
        raise first

    def _find(self, iteration: int) -> None:
        """Pin and read the manifests."""
        good: list[ShardManifest] = []
        bad: list[str] = []
        with agreed(self._comm, f"reading the manifests in {self._job_dir}"):
            if os.path.isdir(self._job_dir):
                self._stack.enter_context(pins.hold(self._job_dir, iteration))
                good, bad = sealed.load(self._job_dir, iteration)
        mine = [asdict(Found.of(one, self._comm.rank)) for one in good]
        gathered = allgather_json(self._comm, {"found": mine, "bad": bad})
        found = [Found(**entry) for part in gathered for entry in part["found"]]
        chosen = sealed.choose(found, [text for part in gathered for text in part["bad"]], iteration)
        run_id = next(one.run_id for one in chosen.values())
        if os.path.basename(os.path.abspath(self._run_dir)) != run_id:
            raise DataError(
                f"the shards in {self._job_dir} are of run {run_id}, not of the run of {self._run_dir}",
                mend="give the directory of the run that they are of",
            )
        self.own = [one for one in good if chosen[one.rank] == Found.of(one, self._comm.rank)]

    def durable(self, iteration: int) -> DrainedManifest | None:
        """Published manifest, as rank 0 sees it."""
        there = b""
        with agreed(self._comm, f"reading {self._run_dir}"):
            if self._comm.rank == 0:
                manifest = durable(self._run_dir, iteration)
                there = manifest.to_bytes() if manifest else b""
        data = self._comm.bcast(there)
        return DrainedManifest.from_bytes(data, where="the published manifest") if data else None
