"""Hashes of an item, in one pass over its bytes: its own, and one for each of its blocks if it has more than one.

The hash of an item of several blocks is that of its blocks' digests, one after the other. So no byte is hashed twice, a
part of an item can be checked without reading the rest, and an error can say which bytes are wrong.
"""

from __future__ import annotations

from typing import Any

import xxhash

from slurm_resil.format.manifest import BLOCK_BYTES, Item, digest_of_blocks

Hashes = tuple[str, tuple[str, ...]]
"""Hash of an item, and those of its blocks; these are empty if it is hashed whole."""


def block_size(nbytes: int) -> int:
    """Size of the blocks in which an item of this size is hashed when it is sealed, bytes; 0 for whole."""
    return BLOCK_BYTES if nbytes > BLOCK_BYTES else 0


class ItemHash:
    """Hashes bytes as they come, in order and in any portions.

    Args:
        block_bytes: Size of a block, bytes; 0 to hash all of them as one.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._state = xxhash.xxh3_128()
        self._filled = 0  # bytes in the block that is not full yet
        self._blocks: list[str] = []

    def update(self, data: Any) -> None:
        """Take more bytes: a contiguous buffer of bytes."""
        if not self._block_bytes:
            self._state.update(data)
            return
        view, at = memoryview(data), 0
        while at < len(view):
            part = view[at : at + self._block_bytes - self._filled]
            self._state.update(part)
            at, self._filled = at + len(part), self._filled + len(part)
            if self._filled == self._block_bytes:
                self._next()

    def finish(self) -> Hashes:
        """Hashes of all that came."""
        if not self._block_bytes:
            return self._state.hexdigest(), ()
        if self._filled:
            self._next()
        return digest_of_blocks(self._blocks), tuple(self._blocks)

    def _next(self) -> None:
        self._blocks.append(self._state.hexdigest())
        self._state.reset()
        self._filled = 0


def count(item: Item) -> int:
    """In how many blocks an item is hashed: one if it is hashed whole."""
    return -(-item.nbytes // item.block_bytes) if item.block_bytes else 1


def block_range(item: Item, index: int) -> tuple[int, int]:
    """First byte of a block in its item, and the byte after its last; an item that is hashed whole has one block."""
    if not item.block_bytes:
        return 0, item.nbytes
    return index * item.block_bytes, min((index + 1) * item.block_bytes, item.nbytes)


def block_hash(item: Item, index: int) -> str:
    """Hash that a block should have."""
    return item.blocks[index] if item.block_bytes else item.xxh3


def flaw(item: Item, found: Hashes) -> str:
    """Say which bytes of an item do not match; empty if all do.

    Args:
        item: It, with the hashes of its seal.
        found: Hashes of its bytes now, in blocks of ``item.block_bytes``.
    """
    xxh3, blocks = found
    if (xxh3, blocks) == (item.xxh3, item.blocks):
        return ""
    bad = [index for index, pair in enumerate(zip(blocks, item.blocks, strict=False)) if pair[0] != pair[1]]
    more = f" and {len(bad) - 1} more blocks" if len(bad) > 1 else ""
    return f"{words(item, bad[0] if bad else 0)}{more} do not match their hash"


def words(item: Item, index: int) -> str:
    """A block of an item, for people."""
    if not item.block_bytes:
        return f"the bytes of {item.name}"
    start, stop = block_range(item, index)
    return f"bytes {start} to {stop} of {item.name}"
