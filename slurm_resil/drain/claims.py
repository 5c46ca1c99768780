"""Sets of byte ranges of a file: what a drain has written and synced. Pure; vectorised, for there may be many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_resil.comm.base import Int64s, Runs

_END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Claims:
    """Ranges in ascending order, none empty, none touching the next.

    Attributes:
        starts: First bytes.
        ends: Bytes after the last ones.
    """

    starts: Int64s
    ends: Int64s

    @classmethod
    def of(cls, starts: Int64s, lengths: Int64s) -> Claims:
        """Make a set of ranges in any order, which may overlap."""
        some = lengths > 0
        starts, ends = starts[some], starts[some] + lengths[some]
        if starts.size == 0:
            return cls(starts, ends)
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        first = np.flatnonzero(np.concatenate(([True], starts[1:] > reach[:-1])))
        return cls(starts[first], reach[np.concatenate((first[1:] - 1, [reach.size - 1]))])

    @classmethod
    def none(cls) -> Claims:
        """The empty set."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))

    @classmethod
    def union(cls, many: Iterable[Claims]) -> Claims:
        """Put sets together."""
        sets = [cls.none(), *many]
        starts = np.concatenate([one.starts for one in sets])
        return cls.of(starts, np.concatenate([one.ends for one in sets]) - starts)

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges."""
        return int((self.ends - self.starts).sum())

    def gaps(self, size: int = _END) -> Claims:
        """What of the first ``size`` bytes is not in the set."""
        starts, ends = np.concatenate(([0], self.ends)), np.concatenate((self.starts, [size]))
        return Claims.of(starts, np.minimum(ends, size) - starts)

    def cut(self, runs: Runs) -> Runs:
        """Those parts of runs whose place in the file is in the set."""
        stop = runs.target + runs.length
        low = np.searchsorted(self.ends, runs.target, "right")
        count = np.maximum(np.searchsorted(self.starts, stop, "left") - low, 0)
        run = np.repeat(np.arange(count.size), count)
        which = np.arange(run.size) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
        begin = np.maximum(runs.target[run], self.starts[which])
        end = np.minimum(stop[run], self.ends[which])
        return Runs(source=runs.source[run] + begin - runs.target[run], target=begin, length=end - begin)

    def pack(self) -> list[list[int]]:
        """Rows of start, length, distance and count: ranges of one length at equal distances are one row."""
        starts, lengths = self.starts, self.ends - self.starts
        step = np.diff(starts)
        breaks = lengths[1:] != lengths[:-1]
        breaks[1:] |= ~breaks[:-1] & (step[1:] != step[:-1])
        first = np.concatenate(([0], np.flatnonzero(breaks) + 1)) if starts.size else np.empty(0, np.int64)
        count = np.diff(np.concatenate((first, [starts.size])))
        distance = np.where(count > 1, np.concatenate((step, [0]))[first], 0)
        return [list(row) for row in np.stack((starts[first], lengths[first], distance, count), axis=1).tolist()]

    @classmethod
    def unpack(cls, rows: Sequence[Sequence[int]]) -> Claims:
        """Make the set of packed rows.

        Raises:
            ValueError: They are none.
        """
        table = np.array(rows, np.int64).reshape(-1, 4)
        start, length, distance, count = table.T
        if (table < 0).any():
            raise ValueError("ranges below zero")
        row = np.repeat(np.arange(count.size), count)
        number = np.arange(row.size) - np.repeat(np.cumsum(count) - count, count)
        return cls.of(start[row] + number * distance[row], length[row])
