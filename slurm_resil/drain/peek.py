"""Random reads of one tensor of a checkpoint: of the drained file, or of a shard in this node's burst buffer.

Nothing is given that was not verified, and no more is read than the blocks that are touched (of a shard from before
there were blocks, the whole item). Memory is bounded, however large the tensor is.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_resil.comm.base import Bytes
from slurm_resil.core import fsio, paths, pins
from slurm_resil.core.errors import DataError, UsageError
from slurm_resil.drain import check
from slurm_resil.format import blocks, layout
from slurm_resil.format.decode import Array, decode
from slurm_resil.format.manifest import DrainedItem, DrainedManifest, Item, ShardManifest, digest

CHUNK_BYTES = 8 << 20
Read = Callable[[int, int], Bytes]  # verified bytes from .. to, of an item if nothing else is said
Index = tuple[range, ...]  # which elements of each dimension; the steps are positive


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A part of a tensor.

    Attributes:
        index: Elements of each dimension.
        shape: Shape of the part: dimensions of which one element was named are gone.
    """

    index: Index
    shape: tuple[int, ...]


def select(text: str, shape: Sequence[int]) -> Selection:
    """Read a part as numpy would write it: ``0:2,:,5``, ``...,-1``, ``::4``; empty: everything.

    Raises:
        UsageError: It is none, or it is outside of the shape.
    """
    mend = f"the shape is {tuple(shape)}; write a number or START:STOP[:STEP] for each dimension, as in 0:2,:,5"
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if parts.count("...") > 1 or len(parts) - parts.count("...") > len(shape):
        raise UsageError(f"--slice {text!r} has too many dimensions", mend=mend)
    missing = [":"] * (len(shape) - len(parts) + parts.count("..."))
    at = parts.index("...") if "..." in parts else len(parts)
    parts = parts[:at] + missing + parts[at + 1 :]
    index, left = [], []
    for part, size in zip(parts, shape, strict=True):
        try:
            numbers = [int(word) if word.strip() else None for word in part.split(":")]
        except ValueError as error:
            raise UsageError(f"--slice {text!r}: {part!r} is no range", mend=mend) from error
        if len(numbers) == 1 and numbers[0] is not None and -size <= numbers[0] < size:
            index.append(range(size)[numbers[0] : numbers[0] + 1 or None])
        elif 2 <= len(numbers) <= 3 and (len(numbers) < 3 or numbers[2] is None or numbers[2] > 0):
            index.append(range(size)[slice(*numbers)])
            left.append(len(index[-1]))
        else:
            raise UsageError(f"--slice {text!r}: {part!r} is no range in 0:{size}", mend=mend)
    return Selection(index=tuple(index), shape=tuple(left))


def parts(item: Item | DrainedItem, index: Index, read: Read, *, raw: bool = False) -> Iterator[Array]:
    """Give the elements of a part of an item in row-major order, decoded, in pieces of bounded size.

    Args:
        item: It.
        index: Which elements.
        read: Reads verified bytes of it.
        raw: Give their bytes as they are.

    Raises:
        DataError: It is damaged.
    """
    if all(index) and item.nbytes:
        for data in _walk(0, item.shape, index, layout.itemsize(item.dtype), read):
            yield data if raw else decode(item.dtype, data)


def _walk(at: int, shape: tuple[int, ...], index: Index, size: int, read: Read) -> Iterator[Bytes]:
    """Bytes of a part of what begins at a byte: contiguous runs, groups of rows, or row by row where one is large."""
    if all(len(chosen) == whole for chosen, whole in zip(index, shape, strict=True)):
        stop, step = at + math.prod(shape) * size, max(CHUNK_BYTES // size, 1) * size
        for start in range(at, stop, step):
            yield read(start, min(start + step, stop))
        return
    rows, row = index[0], math.prod(shape[1:]) * size
    if row > CHUNK_BYTES:
        for one in rows:
            yield from _walk(at + one * row, shape[1:], index[1:], size, read)
        return
    count = max(CHUNK_BYTES // row // rows.step, 1)
    inner = tuple(slice(one.start, one.stop, one.step) for one in index[1:])
    for first in range(0, len(rows), count):
        group = rows[first : first + count]
        raw = read(at + group[0] * row, at + (group[-1] + 1) * row)
        cells = raw.view(f"V{size}").reshape(-1, *shape[1:])[(slice(None, None, rows.step), *inner)]
        yield np.ascontiguousarray(cells).reshape(-1).view(np.uint8)


class _Verified:
    """Bytes of an open file in verified blocks; keeps the last block, which parts that follow each other share.

    Args:
        fd: The file.
        where: Its name, for errors.
        first: Byte of the file at which the first block begins.
        nbytes: Bytes of all blocks.
        block_bytes: Size of a block; the last one may be shorter.
        hash_of: Hash that a block should have.
        words: Says in words what is wrong if a block has another one.
    """

    def __init__(
        self,
        fd: int,
        where: str,
        *,
        first: int,
        nbytes: int,
        block_bytes: int,
        hash_of: Callable[[int], str],
        words: Callable[[int], str],
    ) -> None:
        self._fd, self._where, self._first, self._nbytes = fd, where, first, nbytes
        self._size, self._hash_of, self._words = block_bytes, hash_of, words
        self._known: tuple[int, Bytes] | None = None

    def read(self, start: int, stop: int) -> Bytes:
        """Bytes from .. to, counted from the first block."""
        out = np.empty(stop - start, np.uint8)
        at = start
        while at < stop:
            number, skip = divmod(at, self._size)
            piece = self._block(number)[skip : skip + stop - at]
            out[at - start : at - start + len(piece)] = piece
            at += len(piece)
        return out

    def _block(self, number: int) -> Bytes:
        if self._known is None or self._known[0] != number:
            begin = number * self._size
            data = np.empty(min(self._size, self._nbytes - begin), np.uint8)
            fsio.pread_into(self._fd, data.data, self._first + begin, self._where)
            if digest(data) != self._hash_of(number):
                raise DataError(f"{self._where}: {self._words(number)}", path=self._where, fault="flipped")
            self._known = number, data
        return self._known[1]


@contextlib.contextmanager
def drained(run_dir: str, manifest: DrainedManifest, item: DrainedItem) -> Iterator[Read]:
    """Open an item of a drained file, see :func:`drained_file`."""
    with drained_file(run_dir, manifest) as read:
        base = item.offset or 0
        yield lambda start, stop: read(base + start, base + stop)


@contextlib.contextmanager
def drained_file(run_dir: str, manifest: DrainedManifest) -> Iterator[Read]:
    """Open a drained file, whose bytes are then read as they are; retention leaves it alone meanwhile.

    Raises:
        DataError: The file is missing or truncated; when read: a block is damaged, naming what lies in it.
    """
    path = os.path.join(run_dir, os.path.basename(manifest.file))
    with _opened(path) as fd:
        pins.share(fd)
        found, size = os.fstat(fd).st_size, manifest.block_bytes
        if found != manifest.file_bytes or len(manifest.blocks) != -(-found // size):
            words = f"{path} is truncated: {found} bytes of {manifest.file_bytes}"
            raise DataError(words, path=path, fault="truncated")

        def damaged(number: int) -> str:
            return f"block {number} is damaged{check.inside(manifest, number * size, (number + 1) * size)}"

        file = _Verified(
            fd, path, first=0, nbytes=found, block_bytes=size, hash_of=manifest.blocks.__getitem__, words=damaged
        )
        yield file.read


@contextlib.contextmanager
def local(job_dir: str, manifest: ShardManifest, item: Item) -> Iterator[Read]:
    """Open an item of a shard on this node; its slot is not given away meanwhile.

    Raises:
        DataError: The shard is gone, or its structure is damaged; when read: a block of the item is damaged.
    """
    path = os.path.join(job_dir, "slots", os.path.basename(manifest.slot))
    with pins.hold(job_dir, manifest.iteration):
        if not os.path.exists(paths.manifest(job_dir, manifest.iteration, manifest.rank)):
            raise DataError(f"the shard of rank {manifest.rank} was given up a moment ago", path=path, fault="stale")
        with _opened(path) as fd:
            flaws = check.outer_flaws(fd, path, manifest)
            if flaws:
                raise DataError("; ".join(flaws), path=path, fault="flipped")
            if not item.block_bytes and item.nbytes > CHUNK_BYTES:  # sealed before there were blocks
                flaw = check.item_flaw(fd, path, manifest, item, lambda _: None)
                if flaw:
                    raise DataError(flaw, path=path, fault="flipped")
                yield _plain(fd, path, item.offset or 0)
                return
            file = _Verified(
                fd,
                path,
                first=item.offset or 0,
                nbytes=item.nbytes,
                block_bytes=item.block_bytes or max(item.nbytes, 1),
                hash_of=lambda number: blocks.block_hash(item, number),
                words=lambda number: (
                    f"{blocks.words(item, number)} of rank {manifest.rank} do not match the hash of the seal"
                ),
            )
            yield file.read


def _plain(fd: int, path: str, base: int) -> Read:
    def read(start: int, stop: int) -> Bytes:
        out = np.empty(stop - start, np.uint8)
        fsio.pread_into(fd, out.data, base + start, path)
        return out

    return read


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing", path=path, fault="missing") from error
    try:
        yield fd
    finally:
        os.close(fd)
