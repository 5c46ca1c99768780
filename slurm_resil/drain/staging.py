"""The staged copy of a drained file on one node while it is being made, see :mod:`slurm_resil.format.staged`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

import numpy as np

from slurm_resil.comm.base import Bytes
from slurm_resil.core import faults, fsio, paths
from slurm_resil.core.errors import DataError, SpaceError, TryAgainError
from slurm_resil.core.log import now_s
from slurm_resil.format import staged
from slurm_resil.format.manifest import DrainedManifest, digest
from slurm_resil.format.staged import Blocks, StagedManifest

_LOCK_S = 1.0  # ranks that look whether a fetch is at work hold the lock for a moment
_MEMINFO = "/proc/meminfo"


class Staging:
    """See the module. Use as a context manager: it holds the lock, and what was right before is kept.

    Staged copies of other iterations are removed: there is never more than one.

    Args:
        job_dir: Job's directory in this node's burst buffer; it is made where there is none.
        manifest: Of the drained file.

    Attributes:
        there: Blocks that are in the copy, compared with their hashes.
        kept_bytes: Bytes that an earlier fetch has left, and are right.

    Raises:
        TryAgainError: Another fetch is at work here.
        OSError: The file system refuses.
    """

    def __init__(self, job_dir: str, manifest: DrainedManifest) -> None:
        self._job_dir, self._manifest = job_dir, manifest
        self.path = paths.staged(job_dir, manifest.iteration)
        self.there: Blocks = np.zeros(len(manifest.blocks), np.bool_)
        for directory in (job_dir, paths.fetched(job_dir)):  # before the agent, or beside it
            os.makedirs(directory, mode=0o700, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._lock()
            staged.clear(job_dir, keep=lambda iteration: iteration == manifest.iteration)
            os.ftruncate(self._fd, manifest.file_bytes)
            self._check()
        except BaseException:
            os.close(self._fd)
            raise
        self.kept_bytes = self.size(self.there)

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _lock(self) -> None:
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() < until:
                    time.sleep(0.01)
                    continue
                raise TryAgainError(f"another fetch is at work on {self.path}") from error
            except OSError:
                pass  # no locks here: what two write is the same
            return

    def _check(self) -> None:
        """Find what is there already: of a hole nothing is read."""
        end, size = self._manifest.file_bytes, self._manifest.block_bytes
        memory = np.empty(min(size, max(end, 1)), np.uint8)
        at = 0
        while at < end:
            try:
                at = os.lseek(self._fd, at, os.SEEK_DATA)
            except OSError:
                return  # holes only, up to the end
            index = at // size
            start, stop = self._span(index)
            with contextlib.suppress(DataError):
                fsio.pread_into(self._fd, memory[: stop - start].data, start, self.path)
                self.there[index] = self._right(index, memory[: stop - start])
            at = stop

    def _span(self, index: int) -> tuple[int, int]:
        size = self._manifest.block_bytes
        return index * size, min((index + 1) * size, self._manifest.file_bytes)

    def _right(self, index: int, data: Bytes) -> bool:
        return digest(data) == self._manifest.blocks[index]

    def size(self, blocks: Blocks) -> int:
        """Bytes of blocks."""
        indices = np.flatnonzero(blocks)
        short = len(indices) and indices[-1] == len(blocks) - 1
        last, stop = self._span(len(blocks) - 1) if short else (0, 0)
        return (len(indices) - int(bool(short))) * self._manifest.block_bytes + stop - last

    def check_room(self, blocks: Blocks) -> None:
        """See whether blocks that are not there fit: half of what is free may be used, the training needs the rest.

        Raises:
            SpaceError: They do not; says how much is needed and how much there is.
        """
        need, free = self.size(blocks & ~self.there), free_bytes(self._fd, self._job_dir)
        if need > free // 2:
            words = f"{need} bytes would be staged in {self._job_dir}, which has {free} bytes free, half of them for it"
            raise SpaceError(words, path=self._job_dir)

    def write(self, index: int, data: Bytes) -> bool:
        """Compare a block with its hash and write it; False if it does not match.

        Raises:
            OSError: The file system refuses.
        """
        if not self._right(index, data):
            return False
        faults.point("fetch.write")
        at, view = self._span(index)[0], data.data
        while view:
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done
        self.there[index] = True
        return True

    def publish(self) -> None:
        """Say which blocks are there; does nothing if the copy was cleared away meanwhile.

        Raises:
            OSError: The file system refuses.
        """
        mine = os.fstat(self._fd)
        try:
            now = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return
        if (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino):
            found = StagedManifest.of(self._manifest, self.there, created_s=round(now_s(), 3))
            found.publish(paths.staged_manifest(self._job_dir, self._manifest.iteration), sync=False)

    def remove(self) -> None:
        """Give the space back."""
        with contextlib.suppress(OSError):
            staged.clear(self._job_dir)


def free_bytes(fd: int, where: str) -> int:
    """Free space of a burst buffer; where it lies in memory, no more than the memory that is free."""
    info = os.statvfs(where)
    free = info.f_bavail * info.f_frsize
    if fsio.in_memory(fd):
        with contextlib.suppress(OSError, ValueError, StopIteration), open(_MEMINFO, encoding="ascii") as file:
            line = next(line for line in file if line.startswith("MemAvailable:"))
            free = min(free, int(line.split()[1]) << 10)
    return free
