"""The frame of a slot: every byte that is neither an item's nor the stamp's, so HDF5's structure and what pads it.

Nobody writes there once the slot is laid out, so that one hash in the manifest covers it. With the items' hashes and
the stamp, which is compared word by word, no byte of a sealed slot changes unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import xxhash

from slurm_resil.core.errors import DataError
from slurm_resil.format import stamp
from slurm_resil.format.manifest import Item, ShardManifest

_CHUNK_BYTES = 8 << 20  # read at once; a gap is small unless the manifest is odd

Read = Callable[[int, int], Any]  # a buffer with the bytes from .. to


def spans(items: Iterable[Item]) -> Iterator[tuple[int, int]]:
    """Byte ranges of items."""
    return ((item.offset, item.offset + item.nbytes) for item in items if item.offset is not None)


def gaps(taken: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Byte ranges of a slot of ``size`` bytes that belong to the frame, in order; ``taken`` are those of the items."""
    at = 0
    for start, stop in sorted([*stamp.RANGES, *taken]):
        if at < min(start, size):
            yield at, min(start, size)
        at = max(at, stop)
    if at < size:
        yield at, size


def digest(read: Read, taken: Iterable[tuple[int, int]], size: int) -> str:
    """Hash the frame of a slot, see :func:`gaps`."""
    state = xxhash.xxh3_128()
    pieces: list[Any] = []  # hashed together: there is a gap between any two items, and most are a few bytes
    held = 0
    for start, stop in gaps(taken, size):
        for at in range(start, stop, _CHUNK_BYTES):
            pieces.append(read(at, min(at + _CHUNK_BYTES, stop)))
            held += len(pieces[-1])
            if held >= _CHUNK_BYTES:
                state.update(b"".join(pieces))
                pieces, held = [], 0
    state.update(b"".join(pieces))
    return state.hexdigest()


def check(read: Read, manifest: ShardManifest, size: int, where: str) -> None:
    """Compare the frame of a slot with its manifest; one from before there were such hashes says nothing.

    Raises:
        DataError: It is another (fault ``flipped``).
    """
    if manifest.frame and digest(read, spans(manifest.items), size) != manifest.frame:
        raise DataError(
            f"{where}: the file's structure (superblock, headers, padding) does not match its hash",
            fault="flipped",
            iteration=manifest.iteration,
        )
