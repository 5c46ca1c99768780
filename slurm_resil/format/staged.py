"""Staged copies: blocks of a drained file in a node's burst buffer, put there by a fetch before ranks restore.

A copy is worth nothing by itself: whoever reads it compares each block with the hash in the drained file's own
manifest, and takes what is missing or does not match from the drained file.

While a fetch is at work it holds a lock (``flock``) on the copy, which ends with the process, however that ends. A rank
that waits for it says so: from then on the fetch takes no longer than the ranks would by themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError
from slurm_resil.core.throttle import Clock, SystemClock
from slurm_resil.format.manifest import Document, DrainedManifest, digest_of_blocks

STILL_S = 10.0  # a fetch that has staged nothing for so long is not waited for
LONGEST_S = 900.0
_POLL_S = 0.05
Blocks = npt.NDArray[np.bool_]
"""For every block of a drained file whether it is meant."""


@dataclass(frozen=True, kw_only=True)
class StagedManifest(Document):
    """What of a drained file is staged on a node; beside the copy, published last.

    Attributes:
        contents: Hash of the hashes of all blocks of the drained file: of another file nothing is staged.
        blocks: Which blocks are there: ranges of block numbers, first and the one after the last, in order.
    """

    run_id: str
    iteration: int
    contents: str
    blocks: tuple[tuple[int, int], ...]
    created_s: float = 0.0

    @classmethod
    def of(cls, manifest: DrainedManifest, there: Blocks, *, created_s: float) -> StagedManifest:
        """Say which blocks of a drained file are there."""
        return cls(
            run_id=manifest.run_id,
            iteration=manifest.iteration,
            contents=digest_of_blocks(manifest.blocks),
            blocks=tuple(spans(there)),
            created_s=created_s,
        )

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> StagedManifest:
        return cls(**{**raw, "blocks": tuple((int(first), int(stop)) for first, stop in raw["blocks"])})

    def there(self, manifest: DrainedManifest) -> Blocks:
        """Which blocks of a drained file are there; none if it is of another one."""
        found = np.zeros(len(manifest.blocks), np.bool_)
        if self.contents == digest_of_blocks(manifest.blocks):
            for first, stop in self.blocks:
                found[max(first, 0) : max(stop, 0)] = True
        return found


def spans(blocks: Blocks) -> list[tuple[int, int]]:
    """Ranges of the blocks that are meant: first, and the one after the last."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], blocks.view(np.int8), [0]))))
    return [(int(first), int(stop)) for first, stop in edges.reshape(-1, 2)]


class StagedCopy:
    """A staged copy that is read. Use as a context manager.

    Args:
        fd: The copy, open; closed at the end.
        path: Its name.
        there: Which blocks are there.
    """

    def __init__(self, fd: int, path: str, there: Blocks) -> None:
        self._fd, self.path, self._there = fd, path, there

    def __enter__(self) -> StagedCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)

    def read(self, index: int, start: int, out: memoryview) -> bool:
        """Read a block that begins at byte ``start``; False if it is not there, or cannot be read."""
        if not self._there[index]:
            return False
        try:
            fsio.pread_into(self._fd, out, start, self.path)
        except (OSError, DataError):
            self.drop(index)
            return False
        return True

    def drop(self, index: int) -> None:
        """Never give a block again."""
        self._there[index] = False


def find(job_dir: str, manifest: DrainedManifest) -> StagedCopy | None:
    """Open the staged copy of a drained file on this node; None if there is none."""
    path = paths.staged(job_dir, manifest.iteration)
    with contextlib.suppress(OSError, DataError):
        there = StagedManifest.load(paths.staged_manifest(job_dir, manifest.iteration)).there(manifest)
        if there.any():
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            if os.fstat(fd).st_size == manifest.file_bytes:
                return StagedCopy(fd, path, there)
            os.close(fd)
    return None


def wait(job_dir: str, iteration: int, *, clock: Clock | None = None) -> float:
    """Wait for a fetch that is at work on this node; returns how long, seconds.

    A fetch that is waited for ends by itself when it takes longer than the ranks would take without it. Here one is
    given up that does not get on at all, however that may be.
    """
    clock = clock or SystemClock()
    began = moved = clock.now()
    newest = 0
    while (at := _worked_on(job_dir, iteration)) is not None:
        if not newest:
            _say_waiting(job_dir)
        now = clock.now()
        if at != newest:
            newest, moved = at, now
        if now - moved > STILL_S or now - began > LONGEST_S:
            break
        clock.sleep(_POLL_S)
    return clock.now() - began


def waited_for(job_dir: str) -> bool:
    """Whether a rank of this node waits for the fetch, or has waited for it."""
    return os.path.exists(paths.fetch_waited_for(job_dir))


def _say_waiting(job_dir: str) -> None:
    with contextlib.suppress(OSError):
        os.close(
            os.open(paths.fetch_waited_for(job_dir), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        )


def _worked_on(job_dir: str, iteration: int) -> int | None:
    """When something was last written to a copy that a fetch is at work on, nanoseconds; None if there is none."""
    try:
        fd = os.open(paths.staged(job_dir, iteration), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.fstat(fd).st_mtime_ns
    except OSError:
        pass  # no locks here: there is nothing to wait for that could be seen
    finally:
        os.close(fd)
    return None


def clear(job_dir: str, *, keep: Callable[[int], bool] = lambda _: False) -> None:
    """Remove staged copies, their manifests first; what a fetch still writes to is gone with its process.

    Args:
        job_dir: Job's directory in the burst buffer.
        keep: Asked for each iteration.

    Raises:
        OSError: The file system refused.
    """
    directory = paths.fetched(job_dir)
    try:
        names: Sequence[str] = os.listdir(directory)
    except FileNotFoundError:
        return
    for name in sorted(names, key=lambda one: not one.endswith(".json")):
        parsed = paths.parse_of_drained(name)
        if parsed is None or not keep(parsed[0]):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
