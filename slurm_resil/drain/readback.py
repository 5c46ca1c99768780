"""Reads a drained file back: every source's bytes against the hash of its seal, and the table of block hashes.

A mover reads its part of the file once, in the order of the file: each window goes into the hashes of the blocks and of
the sources that lie in it, however these are interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from slurm_resil.comm.base import Bytes, Runs
from slurm_resil.core.errors import StoppedError
from slurm_resil.drain import boxes
from slurm_resil.drain.ahead import PAGE_BYTES, ahead, buffer
from slurm_resil.drain.between import gaps, within
from slurm_resil.drain.plan import Plan, Source
from slurm_resil.drain.rounds import MAX_RUNS
from slurm_resil.drain.shards import READ_BYTES, Slots
from slurm_resil.drain.storage import Reader
from slurm_resil.drain.strided import gather
from slurm_resil.format.blocks import ItemHash
from slurm_resil.format.manifest import digest


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was read back.

    Attributes:
        wrong: Targets that differ from what was sealed.
        blocks: Hashes of the blocks, hexadecimal.
        frame: Hash of what lies between the data in these blocks, see :mod:`slurm_resil.drain.between`.
    """

    wrong: list[int]
    blocks: list[str]
    frame: str


@dataclass
class _Checked:
    """A source that is hashed while the file goes by.

    Attributes:
        source: It.
        base: Where its target starts in the file, bytes.
        begin: Its first byte in the file.
        end: Byte after its last one.
        state: Hash of what came.
        at: Bytes of the item that came.
        in_order: Whether the file has had them in the order of the item; if not, it is checked apart.
    """

    source: Source
    base: int
    begin: int
    end: int
    state: ItemHash
    at: int = 0
    in_order: bool = True

    @property
    def right(self) -> bool:
        """Whether all that came is what was sealed."""
        return self.state.finish()[0] == self.source.item.xxh3

    def feed(self, data: Bytes, begin: int) -> None:
        """Take what lies in a window of the file that begins at a byte."""
        first, last = max(begin, self.begin), min(begin + data.size, self.end)
        if not self.in_order or first >= last:
            return
        if self.end - self.begin == self.source.item.nbytes:  # one range, and so in order
            self.state.update(data[first - begin : last - begin])
            return
        source = self.source
        step = max(source.run_bytes(part) for part in range(len(source.parts))) * MAX_RUNS
        for start in range(first, last, step):
            stop = min(start + step, last)
            runs = [
                source.runs(part, *(source.before(part, at - self.base) for at in (start, stop)))
                for part in range(len(source.parts))
            ]
            self._take(Runs.joined(runs), data, begin - self.base)

    def _take(self, runs: Runs, data: Bytes, skip: int) -> None:
        inside, target, length = runs.source, runs.target - skip, runs.length
        if len(self.source.parts) > 1:
            order = np.argsort(inside, kind="stable")
            inside, target, length = inside[order], target[order], length[order]
        ends = np.cumsum(length) + self.at
        self.in_order = bool((inside == ends - length).all())
        if self.in_order and ends.size:
            self.at = int(ends[-1])
            self.state.update(gather(data, target, length))


def windows(ranges: Sequence[tuple[int, int]], size: int, limit: int) -> list[tuple[int, int]]:
    """Cut ranges of a file into reads: nothing twice, each begins at a page, none crosses a multiple of ``size``.

    Args:
        ranges: First byte and byte after the last one; they may overlap.
        size: Largest read, a multiple of the page size.
        limit: Size of the file.
    """
    found: list[tuple[int, int]] = []
    at = 0
    for begin, end in sorted(ranges):
        begin = max(begin // PAGE_BYTES * PAGE_BYTES, at)
        end = min(-(-end // PAGE_BYTES) * PAGE_BYTES, limit)
        while begin < end:
            at = min((begin // size + 1) * size, end)
            if found and found[-1][1] == begin and begin % size:
                found[-1] = (found[-1][0], at)
            else:
                found.append((begin, at))
            begin = at
    return found


def shares(plan: Plan, offsets: Sequence[int | None], file_bytes: int, movers: int, block_bytes: int) -> list[int]:
    """Blocks at which the movers' parts of the table begin, and their number: parts of about the same bytes of data.

    The parts of the checks are cut at the same bytes, see :meth:`Part.checks`, so that most is read once.
    """
    cuts, before = [0], 0
    for target, offset in zip(plan.targets, offsets, strict=True):
        while len(cuts) < movers and plan.nbytes * len(cuts) // movers < before + target.nbytes:
            at = (offset or 0) + plan.nbytes * len(cuts) // movers - before
            cuts.append(at // block_bytes)
        before += target.nbytes
    count = -(-file_bytes // block_bytes)
    return [*cuts, *[count] * (movers + 1 - len(cuts))]


class ReadBack:
    """An unpublished drained file, opened for reading.

    Args:
        path: The file.
        offsets: Where each target starts; None for empty ones.
        plan: Plan.
        stop: Asked between reads; True ends with StoppedError.
        done: Told the bytes of each read.
        past: Read past the page cache, as far as the system can.
    """

    def __init__(
        self,
        path: str,
        offsets: Sequence[int | None],
        plan: Plan,
        *,
        stop: Callable[[], bool],
        done: Callable[[int], None],
        past: bool = True,
    ) -> None:
        self._path, self._offsets, self._plan, self._stop, self._done = path, offsets, plan, stop, done
        self._file = Reader(path, past=past)
        self._gaps = gaps(offsets, plan, self._file.size)

    @property
    def words(self) -> str:
        """Where the bytes came from, see :class:`Reader`."""
        return self._file.words

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def check(self, slots: Slots, first: int, last: int, block_bytes: int) -> Found:
        """Check the sources that are this mover's to check, and hash some blocks of the file.

        Args:
            slots: Open slots of this node.
            first: First block to hash.
            last: Block after the last one.
            block_bytes: Size of a block.

        Raises:
            StoppedError: Asked to stop.
            DataError: The file is too short.
            OSError: It cannot be read.
        """
        sources = [self._plan.sources[index] for index in self._plan.checks]
        whole = [one.whole for one in sources]
        wrong = [
            s.target for s, is_whole in zip(sources, whole, strict=True) if not is_whole and not self._same(s, slots)
        ]
        known = [self._checked(s) for s, is_whole in zip(sources, whole, strict=True) if is_whole]
        coming = sorted(known, key=lambda one: one.begin, reverse=True)
        active: list[_Checked] = []
        hashes: list[str] = []
        region = first * block_bytes, min(last * block_bytes, self._file.size)
        between = within(self._gaps, *region)[::-1]
        structure = xxhash.xxh3_128()
        ranges = [region, *((one.begin, one.end) for one in known)]
        size = max(READ_BYTES // block_bytes, 1) * block_bytes
        for begin, data in ahead(self._reads(windows(ranges, size, self._file.size))):
            end = begin + data.size
            for block in range(max(first, -(-begin // block_bytes)), min(last, -(-end // block_bytes))):
                at = block * block_bytes - begin
                hashes.append(digest(data[at : at + block_bytes]))
            while between and between[-1][0] < end:
                gap = between.pop()
                structure.update(data[max(gap[0] - begin, 0) : min(gap[1], end) - begin].data)
                if gap[1] > end:
                    between.append((end, gap[1]))
                    break
            while coming and coming[-1].begin < end:
                active.append(coming.pop())
            for one in active:
                one.feed(data, begin)
            active = [one for one in active if one.end > end]
            self._tick(data.size)
        wrong += [one.source.target for one in known if not (one.right if one.in_order else self._apart(one.source))]
        return Found(wrong=wrong, blocks=hashes, frame=structure.hexdigest())

    def _checked(self, source: Source) -> _Checked:
        base = self._base(source)
        begin, end = source.span
        state = ItemHash(source.item.block_bytes)
        return _Checked(source=source, base=base, begin=base + begin, end=base + end, state=state)

    def _base(self, source: Source) -> int:
        base = self._offsets[source.target]
        assert base is not None
        return base

    def _reads(self, parts: Sequence[tuple[int, int]]) -> Iterator[Callable[[], tuple[int, Bytes]]]:
        size = max((end - begin for begin, end in parts), default=0)
        buffers = [buffer(-(-size // PAGE_BYTES) * PAGE_BYTES) for _ in range(min(2, len(parts)))]
        for number, (begin, end) in enumerate(parts):

            def read(begin: int = begin, end: int = end, out: Bytes = buffers[number % 2]) -> tuple[int, Bytes]:
                return begin, self._file.read(begin, end, out)

            yield read

    def _apart(self, source: Source) -> bool:
        """Check a source whose bytes are not in order in the file: put it together in memory."""
        item = np.empty(source.item.nbytes, np.uint8)
        self._forget(source)
        for part in range(len(source.parts)):
            runs = source.runs(part, 0, source.part_bytes(part))
            for inside, at, size in zip(runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True):
                self._file.read_at(self._base(source) + at, item[inside : inside + size].data)
            self._tick(source.part_bytes(part))
        state = ItemHash(source.item.block_bytes)
        state.update(item.data)
        return state.finish()[0] == source.item.xxh3

    def _same(self, source: Source, slots: Slots) -> bool:
        """Compare with the slot itself: the item has elements outside of its extents, so that its hash is no help."""
        if slots.flaw(source):
            return False
        self._forget(source)
        for part in range(len(source.parts)):
            size = source.part_bytes(part)
            here, there = (np.empty(min(READ_BYTES, size), np.uint8) for _ in range(2))
            for first in range(0, size, READ_BYTES):
                last = min(size, first + READ_BYTES)
                slots.read(source, part, first, last, here[: last - first])
                runs = source.runs(part, first, last)
                offset, length = boxes.segments(runs.target, runs.length)
                at = 0
                for start, count in zip(offset.tolist(), length.tolist(), strict=True):
                    self._file.read_at(self._base(source) + start, there[at : at + count].data)
                    at += count
                self._tick(last - first)
                if not np.array_equal(here[: last - first], there[: last - first]):
                    return False
        return True

    def _forget(self, source: Source) -> None:
        base = self._base(source)
        begin, end = source.span
        self._file.forget(base + begin, base + end)

    def _tick(self, nbytes: int) -> None:
        self._done(nbytes)
        if self._stop():
            raise StoppedError("stopped as asked")
