"""What of a drained file is no tensor's: HDF5's structure, and padding. Nothing changes there while data is written."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import xxhash

from slurm_resil.drain.claims import Claims
from slurm_resil.drain.plan import Plan

_CHUNK_BYTES = 8 << 20

Ranges = list[tuple[int, int]]
"""First bytes, and bytes after the last ones."""


def gaps(offsets: Sequence[int | None], plan: Plan, file_bytes: int) -> Ranges:
    """Ranges of a file in which no data lies, in order."""
    pairs = [(at, one.nbytes) for at, one in zip(offsets, plan.targets, strict=True) if at is not None]
    table = np.array(pairs, np.int64).reshape(-1, 2)
    outside = Claims.of(table[:, 0], table[:, 1]).gaps(file_bytes)
    return list(zip(outside.starts.tolist(), outside.ends.tolist(), strict=True))


def within(ranges: Ranges, begin: int, end: int) -> Ranges:
    """What of ranges in order lies in another one."""
    first = bisect_right(ranges, begin, key=lambda one: one[1])
    last = bisect_left(ranges, end, key=lambda one: one[0])
    return [(max(a, begin), min(b, end)) for a, b in ranges[first:last]]


def hash_of(fd: int, ranges: Ranges) -> str:
    """Hash ranges of a file, one after the other.

    Raises:
        OSError: It cannot be read.
    """
    state = xxhash.xxh3_128()
    for begin, end in ranges:
        for at in range(begin, end, _CHUNK_BYTES):
            state.update(os.pread(fd, min(_CHUNK_BYTES, end - at), at))
    return state.hexdigest()
