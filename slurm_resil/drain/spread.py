"""Who reads which blocks of a drained file from the parallel file system, and who gets them then. Pure.

Blocks are cut into pieces that are wanted by the same nodes. A piece is read by a node that wants it, unless that one
has read its fair share: when one node has lost everything, all read for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_resil.comm.base import Int64s
from slurm_resil.format.staged import Blocks

_AT_ONCE = 4096  # blocks of all nodes that are looked at together


@dataclass(frozen=True)
class Piece:
    """Blocks that are read at once.

    Attributes:
        first: First block.
        stop: The one after the last.
        reader: Mover that reads them.
        takers: Movers that want them; the reader may be one of them.
    """

    first: int
    stop: int
    reader: int
    takers: frozenset[int]

    @property
    def others(self) -> list[int]:
        """Takers that the reader sends it to, the next in number first: not all send to the same one."""
        return sorted(self.takers - {self.reader}, key=lambda one: (one < self.reader, one))


def pieces(wants: Sequence[bytes], count: int, most: int) -> list[Piece]:
    """Plan.

    Args:
        wants: By mover, the blocks that it lacks, see :func:`packed`.
        count: Number of blocks.
        most: Most blocks of a piece.

    Returns:
        Pieces in the order in which all movers go through them: each reader's first one, each reader's second one, and
        so on. Every block that anybody lacks is in exactly one of them.
    """
    cut = [
        (at, min(stop, at + most), takers)
        for first, stop, takers in _alike(wants, count)
        for at in range(first, stop, most)
    ]
    total = sum(stop - first for first, stop, _ in cut)
    fair = -(-total // len(wants)) + most
    load = np.zeros(len(wants), np.int64)
    number = [0] * len(wants)
    sets: dict[int, frozenset[int]] = {}  # pieces share them, and what they were made from
    found: list[tuple[int, int, Piece]] = []
    for first, stop, takers in cut:
        reader = int(takers[np.argmin(load[takers])])
        if load[reader] + stop - first > fair:
            reader = int(np.argmin(load))
        load[reader] += stop - first
        wanted_by = sets.get(id(takers)) or sets.setdefault(id(takers), frozenset(takers.tolist()))
        found.append((number[reader], reader, Piece(first, stop, reader, wanted_by)))
        number[reader] += 1
    return [piece for *_, piece in sorted(found, key=lambda one: one[:2])]


def _alike(wants: Sequence[bytes], count: int) -> Iterator[tuple[int, int, Int64s]]:
    """Ranges of blocks that the same movers lack, in the order of the file, without those that nobody does."""
    rows = np.stack([np.frombuffer(want, np.uint8) for want in wants])
    nobody = np.empty(0, np.int64)
    known: dict[bytes, Int64s] = {}
    open_ = (0, 0, nobody)
    for begin in range(0, count, _AT_ONCE):
        end = min(count, begin + _AT_ONCE)
        here = np.unpackbits(rows[:, begin // 8 : -(-end // 8)], axis=1, count=end - begin)
        differs = np.flatnonzero((here[:, 1:] != here[:, :-1]).any(axis=0)) + 1
        for low, high in zip([0, *differs.tolist()], [*differs.tolist(), end - begin], strict=True):
            column = here[:, low]
            takers = known.setdefault(column.tobytes(), np.flatnonzero(column))
            if takers is not open_[2]:
                if open_[2].size:
                    yield open_
                open_ = (begin + low, begin + low, takers)
            open_ = (open_[0], begin + high, takers)
    if open_[2].size:
        yield open_


def packed(blocks: Blocks) -> bytes:
    """Blocks as bits, to be sent."""
    return np.packbits(blocks).tobytes()
