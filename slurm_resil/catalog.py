"""What is restorable, where: sealed shards on this node, drained checkpoints on the parallel file system.

Presence of a manifest means valid. A copy that turned out bad is moved to ``lost/`` beside the reason, and so is never
tried again. Nothing that is not durable is deleted here.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from dataclasses import dataclass

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError, ResilError
from slurm_resil.core.model import CheckpointState
from slurm_resil.format.manifest import DrainedManifest, ShardManifest

LOST = "lost"


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def _move_to_lost(path: str, reason: str, *, sync: bool) -> str:
    """Rename a manifest into ``lost/`` beside it and write the reason; returns the new path."""
    directory, name = os.path.split(path)
    lost = os.path.join(directory, LOST)
    os.makedirs(lost, mode=0o700, exist_ok=True)
    target = os.path.join(lost, f"{name}.{time.time_ns()}")
    os.rename(path, target)  # first: the reason is a courtesy
    with contextlib.suppress(OSError):
        fsio.write_json(f"{target}.reason", {"reason": reason, "time_s": time.time()}, sync=sync)
    if sync:
        fsio.fsync_dir(directory)
    return target


class LocalCatalog:
    """Sealed shards of one job on this node.

    Args:
        job_dir: Job's directory in the burst buffer.
        run_id: Run that shards must belong to; default: whatever is there.
    """

    def __init__(self, job_dir: str, *, run_id: str | None = None) -> None:
        self.job_dir = job_dir
        self.run_id = run_id

    def sealed(self) -> dict[int, dict[int, str]]:
        """Paths of the manifests, by iteration and rank. By their names alone; :meth:`load` reads and checks one."""
        found: dict[int, dict[int, str]] = {}
        directory = os.path.join(self.job_dir, "manifests")
        for name in _names(directory):
            parsed = paths.parse_manifest(name)
            if parsed is not None:
                found.setdefault(parsed[0], {})[parsed[1]] = os.path.join(directory, name)
        return found

    def load(self, iteration: int, rank: int) -> ShardManifest:
        """Read a manifest.

        Raises:
            FileNotFoundError: There is none.
            DataError: Torn, renamed (``context["fault"]``), or of another run.
        """
        path = paths.manifest(self.job_dir, iteration, rank)
        manifest = ShardManifest.load(path)
        if (manifest.iteration, manifest.rank) != (iteration, rank):
            raise DataError(
                f"{path} was renamed: it is of iteration {manifest.iteration}, rank {manifest.rank}", fault="renamed"
            )
        if self.run_id is not None and manifest.run_id != self.run_id:
            raise DataError(f"{path} is swapped: it is of run {manifest.run_id}, not {self.run_id}", fault="swapped")
        return manifest

    def durable(self) -> set[int]:
        """Iterations that the mover has marked durable on this node."""
        names = _names(os.path.join(self.job_dir, "durable"))
        return {iteration for name in names if (iteration := paths.parse_durable(name)) is not None}

    def quarantine(self, iteration: int, rank: int, reason: str) -> str | None:
        """Move a bad shard's manifest out of the candidates; its slot stays as evidence until it is reused.

        Returns:
            Where the manifest went, None if it was gone already.
        """
        try:
            return _move_to_lost(paths.manifest(self.job_dir, iteration, rank), reason, sync=False)
        except FileNotFoundError:
            return None

    def prune(self, *, sealed_all: int, keep: int = 1, in_use: Collection[int] = ()) -> list[int]:
        """Forget shards that nobody needs: durable, older than the newest that all ranks have sealed.

        Args:
            sealed_all: Newest iteration that all ranks of the run have sealed, 0 if none; it always stays.
            keep: How many of the iterations up to ``sealed_all`` stay in any case, at least 1.
            in_use: Iterations that somebody reads.

        Returns:
            Iterations whose manifests were removed. The slots stay, for reuse.
        """
        sealed = self.sealed()
        old = sorted((iteration for iteration in sealed if iteration < sealed_all), reverse=True)[max(keep, 1) - 1 :]
        durable = self.durable()
        gone = [iteration for iteration in old if iteration in durable and iteration not in in_use]
        for iteration in gone:
            for path in sealed[iteration].values():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        return gone


@dataclass(frozen=True, kw_only=True)
class Explained:
    """One checkpoint of a run and what is known about it."""

    iteration: int
    state: CheckpointState
    why: str


class RunCatalog:
    """Drained checkpoints of a run.

    Args:
        run_dir: Run's directory on the parallel file system.
        run_id: Run that they must belong to; default: whatever is there.
    """

    def __init__(self, run_dir: str, *, run_id: str | None = None) -> None:
        self.run_dir = run_dir
        self.run_id = run_id

    def durable(self) -> list[int]:
        """Iterations with a published manifest, newest first. By their names alone."""
        found = (paths.parse_drained(name) for name in _names(self.run_dir))
        return sorted((iteration for iteration in found if iteration is not None), reverse=True)

    def load(self, iteration: int) -> DrainedManifest:
        """Read a manifest and check that its file is there and whole in size.

        Raises:
            FileNotFoundError: There is no manifest.
            DataError: Torn, renamed, or the file is missing or truncated (``context["fault"]``).
        """
        path = paths.drained_manifest(self.run_dir, iteration)
        manifest = DrainedManifest.load(path)
        if manifest.iteration != iteration:
            raise DataError(f"{path} was renamed: it is of iteration {manifest.iteration}", fault="renamed")
        if self.run_id is not None and manifest.run_id != self.run_id:
            raise DataError(f"{path} is swapped: it is of run {manifest.run_id}, not {self.run_id}", fault="swapped")
        file = os.path.join(self.run_dir, os.path.basename(manifest.file))
        try:
            size = os.stat(file, follow_symlinks=False).st_size
        except FileNotFoundError as error:
            raise DataError(f"{file} is missing, though {path} is there", fault="missing") from error
        if size != manifest.file_bytes:
            raise DataError(f"{file} is truncated: {size} bytes of {manifest.file_bytes}", fault="truncated")
        return manifest

    def newest_restorable(self, *, before: int | None = None, exclude: Collection[int] = ()) -> DrainedManifest | None:
        """Find the newest drained checkpoint whose manifest and file size are right; bad ones are passed over.

        Args:
            before: Only older iterations.
            exclude: Iterations not to take, for example those that failed already.
        """
        for iteration in self.durable():
            if iteration in exclude or (before is not None and iteration >= before):
                continue
            with contextlib.suppress(ResilError, FileNotFoundError):
                return self.load(iteration)
        return None

    def explain(self) -> list[Explained]:
        """Say of every checkpoint, lost and unfinished ones too, what it is and why; newest first."""
        found = []
        for iteration in self.durable():
            try:
                manifest = self.load(iteration)
                why = f"{manifest.file_bytes} bytes by {manifest.world_size} ranks"
                found.append(Explained(iteration=iteration, state=CheckpointState.DURABLE, why=why))
            except FileNotFoundError:
                continue
            except ResilError as error:
                found.append(Explained(iteration=iteration, state=CheckpointState.LOST, why=error.message))
        whole = {entry.iteration for entry in found}
        for name in _names(self.run_dir):
            if name.endswith(".h5.part"):
                digits = name.removeprefix(".ckpt-").removesuffix(".h5.part")
                if digits.isdigit() and int(digits) not in whole:
                    why = f"{name}: a drain did not come to its end, or is at work"
                    found.append(Explained(iteration=int(digits), state=CheckpointState.DRAINING, why=why))
        for name in _names(os.path.join(self.run_dir, LOST)):
            iteration_ = paths.parse_drained(".".join(name.split(".")[:2]))
            if iteration_ is not None and name.endswith(".reason"):
                with contextlib.suppress(ResilError, OSError, KeyError, TypeError):
                    reason = str(fsio.read_json(os.path.join(self.run_dir, LOST, name))["reason"])
                    found.append(Explained(iteration=iteration_, state=CheckpointState.LOST, why=reason))
        return sorted(found, key=lambda entry: -entry.iteration)

    def quarantine(self, iteration: int, reason: str) -> str | None:
        """Move a bad checkpoint's manifest out of the candidates; its file stays as evidence.

        Returns:
            Where the manifest went, None if another rank was faster.
        """
        try:
            return _move_to_lost(paths.drained_manifest(self.run_dir, iteration), reason, sync=True)
        except FileNotFoundError:
            return None

    def prune(self, *, keep: int, protect: Collection[int] = ()) -> list[int]:
        """Delete the oldest checkpoints, never the newest ``keep`` that are whole.

        Args:
            keep: How many restorable ones stay, at least 1.
            protect: Iterations that stay in any case.

        Returns:
            Iterations that were deleted.
        """
        whole = []
        for iteration in self.durable():
            with contextlib.suppress(ResilError, FileNotFoundError):
                self.load(iteration)
                whole.append(iteration)
        gone = [iteration for iteration in whole[max(keep, 1) :] if iteration not in protect]
        for iteration in gone:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(paths.drained_manifest(self.run_dir, iteration))  # first: without it there is no checkpoint
            fsio.fsync_dir(self.run_dir)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(paths.drained(self.run_dir, iteration))
        return gone
