"""Read a drained file in blocks, and give nothing that was not compared with its hash."""

from __future__ import annotations

import logging
import os

import numpy as np
import xxhash

from slurm_resil.ckpt import seal
from slurm_resil.ckpt.state import Array
from slurm_resil.core.errors import DataError
from slurm_resil.format.manifest import DrainedManifest
from slurm_resil.format.staged import StagedCopy

log = logging.getLogger(__name__)
CACHE_BYTES = 48 << 20  # verified blocks that are kept between checking and copying


class VerifiedFile:
    """A drained file. The blocks that were used last are kept, in memory that is used again and again.

    Args:
        path: File.
        manifest: What it holds.
        staged: Copy of blocks of it on this node: read first, and closed with this. What is missing there, or does not
            match its hash, is read from the file.

    Attributes:
        read_bytes: Bytes that were read, in blocks.
        staged_bytes: How many of them came from the staged copy.

    Raises:
        DataError: It is missing or truncated.
    """

    def __init__(self, path: str, manifest: DrainedManifest, staged: StagedCopy | None = None) -> None:
        self._path, self._manifest, self._staged = path, manifest, staged
        self._cache: dict[int, memoryview] = {}
        self.read_bytes = self.staged_bytes = 0
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            self._close_staged()
            if not isinstance(error, FileNotFoundError):
                raise
            raise DataError(f"{path} is missing", fault="missing") from error
        try:
            seal.check_drained_size(path, os.fstat(self._fd).st_size, manifest)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)
        self._close_staged()
        self._cache.clear()

    def _close_staged(self) -> None:
        if self._staged is not None:
            self._staged.close()
            self._staged = None

    def blocks_of(self, offset: int, count: int) -> range:
        """Which blocks a range of bytes, not empty, lies in."""
        size = self._manifest.block_bytes
        return range(offset // size, (offset + count - 1) // size + 1)

    def view(self, offset: int, count: int) -> Array:
        """Give a range of bytes, verified; what is given is read-only, and good until the next call.

        Raises:
            DataError: A block does not match its hash, or the file ends early.
        """
        first, *more = self.blocks_of(offset, count)
        if more:
            out = np.empty(count, np.uint8)
            self.read_into(offset, out)
            return out
        return np.frombuffer(self.block(first), np.uint8, count, offset - first * self._manifest.block_bytes)

    def read_into(self, offset: int, out: Array) -> None:
        """Copy a range of bytes, verified, to ``out`` (uint8, 1-d).

        Raises:
            DataError: See :meth:`view`.
        """
        size = self._manifest.block_bytes
        for index in self.blocks_of(offset, len(out)):
            block = np.frombuffer(self.block(index), np.uint8)
            start, stop = max(offset, index * size), min(offset + len(out), index * size + len(block))
            out[start - offset : stop - offset] = block[start - index * size : stop - index * size]

    def block(self, index: int) -> memoryview:
        """Give a block, verified; good until the next call.

        Raises:
            DataError: See :meth:`view`.
        """
        block = self._cache.pop(index, None)
        if block is None:
            manifest = self._manifest
            start = index * manifest.block_bytes
            count = min(manifest.block_bytes, manifest.file_bytes - start)
            block = self._memory(count)
            self.read_bytes += count
            if not self._from_staged(index, start, block):
                self._read(start, block)
                if xxhash.xxh3_128_hexdigest(block) != manifest.blocks[index]:
                    raise seal.flipped_block(self._path, manifest, index)
        self._cache[index] = block
        return block

    def _from_staged(self, index: int, start: int, block: memoryview) -> bool:
        """Read a block from the staged copy and verify it; False if it cannot be had there."""
        staged = self._staged
        if staged is None or not staged.read(index, start, block):
            return False
        if xxhash.xxh3_128_hexdigest(block) != self._manifest.blocks[index]:
            staged.drop(index)
            flaw = seal.flipped_block(staged.path, self._manifest, index)
            log.warning("slurm-resil: %s; they are read from %s", flaw.message, self._path)
            return False
        self.staged_bytes += len(block)
        return True

    def _read(self, start: int, block: memoryview) -> None:
        done = 0
        while done < len(block):
            got = os.preadv(self._fd, [block[done:]], start + done)
            if got == 0:
                raise DataError(f"{self._path} is truncated at byte {start + done}", fault="truncated")
            done += got

    def _memory(self, count: int) -> memoryview:
        """Find memory for a block, that of the block which was not used for longest where there are many."""
        while (len(self._cache) + 1) * self._manifest.block_bytes > CACHE_BYTES and self._cache:
            old = self._cache.pop(next(iter(self._cache)))
            if len(old) == count:
                return old
        return memoryview(bytearray(count))
