"""Items that are in no package, for shards that are rebuilt: which surviving node gives which, and their streams."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_resil.comm.base import Bytes, Communicator, agreed, allgather_json
from slurm_resil.core.errors import DataError
from slurm_resil.format import blocks
from slurm_resil.format.manifest import BLOCK_BYTES, Item
from slurm_resil.redundancy.package import Package, PackageReader, PackageWriter

Content = tuple[int, str]  # size and hash: what an item is known by


def wanted(package: Package) -> dict[Content, list[tuple[int, int]]]:
    """Contents that a package leaves out, with the ranks and the offsets in their slots where they belong."""
    found: dict[Content, list[tuple[int, int]]] = {}
    for shard in package.shards:
        for one in shard.omitted:
            found.setdefault((one.nbytes, one.xxh3), []).append((shard.rank, one.offset))
    return found


def held(reader: PackageReader) -> dict[Content, tuple[int, Item]]:
    """Contents that the shards of a node hold, with the rank and the item."""
    found: dict[Content, tuple[int, Item]] = {}
    for manifest in reader.manifests:
        for item in manifest.items:
            if item.offset is not None:
                found.setdefault((item.nbytes, item.xxh3), (manifest.rank, item))
    return found


@dataclass(frozen=True, kw_only=True)
class Gift:
    """Contents that one node gives another, one after the other in one stream."""

    giver: int
    taker: int
    contents: tuple[Content, ...]

    @property
    def nbytes(self) -> int:
        """Size of the stream."""
        return sum(nbytes for nbytes, _ in self.contents)


def agree_on_givers(
    comm: Communicator, wants: Sequence[Content], reader: PackageReader | None
) -> tuple[list[Gift], list[str], list[Content]]:
    """Find a giver for everything that is wanted on any node, and have it verify what it is to give. Collective.

    Args:
        comm: Movers.
        wants: What this node wants.
        reader: Its own package, None if that is lost.

    Returns:
        All gifts; what was found not to match its hash; what nobody has.
    """
    taking = [[(int(n), str(xxh3)) for n, xxh3 in part] for part in allgather_json(comm, list(wants))]
    asked = list(dict.fromkeys(one for part in taking for one in part))
    if not asked:
        return [], [], []
    mine = held(reader) if reader is not None else {}
    bad: set[Content] = set()
    flaws: list[str] = []
    while True:
        has = np.array([one in mine and one not in bad for one in asked], np.bool_)
        maps = [np.unpackbits(np.frombuffer(part, np.uint8), count=len(asked)) for part in comm.allgather(_pack(has))]
        by_rank = np.stack(maps)
        nobody = [one for one, column in zip(asked, by_rank.T, strict=True) if not column.any()]
        if nobody:
            return [], flaws, nobody
        givers = {}
        for number, (one, column) in enumerate(zip(asked, by_rank.T, strict=True)):
            able = np.flatnonzero(column)
            givers[one] = int(able[number % able.size])  # the work is divided
        fresh: list[str] = []
        with agreed(comm, "verifying items that nodes hold in common"):
            if reader is not None:
                for one in (one for one, giver in givers.items() if giver == comm.rank and one not in bad):
                    flaw = item_flaw(reader, *mine[one])
                    if flaw:
                        bad.add(one)
                        fresh.append(flaw)
        fresh = [text for part in allgather_json(comm, fresh) for text in part]
        flaws += fresh
        if not fresh:
            return _gifts(taking, givers), flaws, []


def _pack(has: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> bytes:
    return np.packbits(has).tobytes()


def _gifts(taking: Sequence[Sequence[Content]], givers: Mapping[Content, int]) -> list[Gift]:
    pairs: dict[tuple[int, int], list[Content]] = {}
    for taker, part in enumerate(taking):
        for one in part:
            pairs.setdefault((givers[one], taker), []).append(one)
    return [Gift(giver=giver, taker=taker, contents=tuple(part)) for (giver, taker), part in sorted(pairs.items())]


def item_flaw(reader: PackageReader, rank: int, item: Item) -> str:
    """Read an item and compare it with its hash; says what is wrong, empty if nothing is.

    Raises:
        OSError: It cannot be read.
    """
    assert item.offset is not None
    state = blocks.ItemHash(item.block_bytes)
    buffer = np.empty(min(BLOCK_BYTES, item.nbytes), np.uint8)
    try:
        for at in range(0, item.nbytes, BLOCK_BYTES):
            part = buffer[: min(BLOCK_BYTES, item.nbytes - at)]
            reader.read_slot(rank, item.offset + at, part)
            state.update(part.data)
    except DataError as error:
        return error.message
    flaw = blocks.flaw(item, state.finish())
    return f"{flaw} in the shard of rank {rank}" if flaw else ""


class _Stream:
    def __init__(self, contents: Sequence[Content]) -> None:
        self._starts = [0]
        for nbytes, _ in contents:
            self._starts.append(self._starts[-1] + nbytes)

    def pieces(self, at: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Cut a range: (number of the content, offset in it, size)."""
        number = bisect.bisect_right(self._starts, at) - 1
        while size > 0:
            part = min(size, self._starts[number + 1] - at)
            yield number, at - self._starts[number], part
            at, size, number = at + part, size - part, number + 1


class GiftSource:
    """What is given, as a source."""

    def __init__(self, reader: PackageReader, gift: Gift) -> None:
        mine = held(reader)
        self._reader, self._stream = reader, _Stream(gift.contents)
        self._places = [(rank, item.offset or 0) for rank, item in (mine[one] for one in gift.contents)]

    def read(self, at: int, buffer: Bytes) -> Bytes:
        """See Source."""
        done = 0
        for number, skip, size in self._stream.pieces(at, buffer.size):
            rank, offset = self._places[number]
            self._reader.read_slot(rank, offset + skip, buffer[done : done + size])
            done += size
        return buffer


class GiftSink:
    """What is given, as a sink: written wherever it belongs."""

    def __init__(self, writer: PackageWriter, gift: Gift) -> None:
        wants = wanted(writer.package)
        self._writer, self._stream = writer, _Stream(gift.contents)
        self._places = [wants[one] for one in gift.contents]

    def write(self, at: int, data: Bytes) -> None:
        """See Sink."""
        done = 0
        for number, skip, size in self._stream.pieces(at, data.size):
            for rank, offset in self._places[number]:
                self._writer.write_slot(rank, offset + skip, data[done : done + size])
            done += size
