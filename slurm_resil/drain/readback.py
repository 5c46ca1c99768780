"""Reads a drained file back: every source's bytes against the hash of its seal, and the table of block hashes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

import numpy as np

from slurm_resil.core.errors import DataError, TryAgainError
from slurm_resil.drain import boxes
from slurm_resil.drain.plan import Plan, Source
from slurm_resil.drain.shards import READ_BYTES, Slots, pread_into
from slurm_resil.format.blocks import ItemHash
from slurm_resil.format.manifest import digest


class ReadBack:
    """An unpublished drained file, opened for reading.

    Args:
        path: The file.
        offsets: Where each target starts; None for empty ones.
        plan: Plan.
        stop: Asked between reads; True ends with TryAgainError.
        done: Told the bytes of each read.
    """

    def __init__(
        self,
        path: str,
        offsets: Sequence[int | None],
        plan: Plan,
        *,
        stop: Callable[[], bool],
        done: Callable[[int], None],
    ) -> None:
        self._path, self._offsets, self._plan, self._stop, self._done = path, offsets, plan, stop, done
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # read from storage and not from memory, where the system can do that
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def wrong(self, slots: Slots) -> list[int]:
        """Targets of this mover's checks that fail.

        Raises:
            TryAgainError: Asked to stop.
            OSError: The file cannot be read.
        """
        sources = [self._plan.sources[index] for index in self._plan.checks]
        return [source.target for source in sources if not self._right(source, slots)]

    def _right(self, source: Source, slots: Slots) -> bool:
        if not source.whole:
            return self._same(source, slots)
        order = sorted(range(len(source.parts)), key=lambda i: source.parts[i][0].start)
        state = ItemHash(source.item.block_bytes)
        if len(order) > 1 and not _stacked(source, order):
            # parts that interleave in the item: put it together in memory
            item = np.empty(source.item.nbytes, np.uint8)
            for part in order:
                self._assemble(source, part, item)
            state.update(item.data)
        else:
            for part in order:
                self._stream(source, part, state.update)
        return state.finish()[0] == source.item.xxh3

    def _stream(self, source: Source, part: int, take: Callable[[memoryview], None]) -> None:
        size = source.part_bytes(part)
        buffer = np.empty(min(READ_BYTES, size), np.uint8)
        for first in range(0, size, buffer.size):
            last = min(size, first + buffer.size)
            view = buffer[: last - first].data
            self._read(source, part, first, last, view)
            take(view)

    def _read(self, source: Source, part: int, first: int, last: int, view: memoryview) -> None:
        base = self._offsets[source.target]
        assert base is not None
        runs = source.runs(part, first, last)
        offset, length = boxes.segments(runs.target, runs.length)
        at = 0
        for start, size in zip(offset.tolist(), length.tolist(), strict=True):
            pread_into(self._fd, view[at : at + size], base + start, self._path)
            at += size
        self._tick(last - first)

    def _assemble(self, source: Source, part: int, item: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        runs = source.runs(part, 0, source.part_bytes(part))
        base = self._offsets[source.target]
        assert base is not None
        for inside, start, size in zip(runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True):
            pread_into(self._fd, item[inside : inside + size].data, base + start, self._path)
        self._tick(source.part_bytes(part))

    def _same(self, source: Source, slots: Slots) -> bool:
        """Compare with the slot itself: the item has elements outside of its extents, so that its hash is no help."""
        if slots.flaw(source):
            return False
        for part in range(len(source.parts)):
            at = 0

            def compare(view: memoryview, part: int = part) -> None:
                nonlocal at
                own = np.empty(len(view), np.uint8)
                slots.read(source, part, at, at + len(view), own)
                at += len(view)
                if own.data != view:
                    raise DataError("differs")

            try:
                self._stream(source, part, compare)
            except DataError:
                return False
        return True

    def blocks(self, mover: int, movers: int, file_bytes: int, block_bytes: int) -> list[str]:
        """Hash this mover's part of the blocks: mover 0 has the first ones.

        Raises:
            TryAgainError: Asked to stop.
            OSError: The file cannot be read.
        """
        count = -(-file_bytes // block_bytes)
        hashes = []
        buffer = np.empty(min(block_bytes, max(file_bytes, 1)), np.uint8)
        for block in range(count * mover // movers, count * (mover + 1) // movers):
            view = buffer[: min(block_bytes, file_bytes - block * block_bytes)].data
            pread_into(self._fd, view, block * block_bytes, self._path)
            hashes.append(digest(view))
            self._tick(len(view))
        return hashes

    def _tick(self, nbytes: int) -> None:
        self._done(nbytes)
        if self._stop():
            raise TryAgainError("stopped as asked")


def _stacked(source: Source, order: Sequence[int]) -> bool:
    """Whether the parts follow each other in the item, each contiguous."""
    at = 0
    for part in order:
        runs = source.runs(part, 0, min(source.part_bytes(part), 1))
        inside = source.parts[part][0]
        _, length = boxes.block(inside.shape, source.shape, source.shape, source.itemsize)
        if int(runs.source[0]) != at or length != source.part_bytes(part):
            return False
        at += length
    return True
