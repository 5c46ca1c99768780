"""Moves byte runs between a buffer and a contiguous one; runs at equal distances, as of a column, in one go. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from slurm_resil.comm.base import Bytes, Int64s

Group = tuple[int, int, int, int]
"""Runs of one length at equal distances: offset of the first, distance, count, length; bytes."""


def groups(offset: Int64s, length: Int64s) -> Iterator[Group]:
    """Put runs that follow each other into groups, in their order.

    Args:
        offset: Where each begins, bytes.
        length: Sizes, bytes, all above 0.
    """
    if offset.size == 0:
        return
    step = np.diff(offset)
    change = length[1:] != length[:-1]
    change[1:] |= step[1:] != step[:-1]
    first = 0
    for at in [*(np.flatnonzero(change) + 1).tolist(), offset.size]:
        if at == first + 1 < offset.size and length[at] == length[first]:
            continue  # the distance from the first run of a group to its second is free
        count = at - first
        yield int(offset[first]), int(step[first]) if count > 1 else 0, count, int(length[first])
        first = at


def gather(data: Bytes, offset: Int64s, length: Int64s, out: Bytes | None = None) -> Bytes:
    """Put the bytes of runs one after the other.

    Args:
        data: Where they are.
        offset: Where each begins, bytes.
        length: Sizes, bytes, all above 0.
        out: Where to, as many bytes as they have.

    Returns:
        ``out``; if that was not given, a view of the data if they are one range already, or a new buffer.
    """
    total = int(length.sum())
    if offset.size and bool((offset[1:] == offset[:-1] + length[:-1]).all()):
        whole = data[int(offset[0]) : int(offset[0]) + total]
        if out is None:
            return whole
        out[:] = whole
        return out
    if out is None:
        out = np.empty(total, np.uint8)
    at = 0
    for group in groups(offset, length):
        size = group[2] * group[3]
        out[at : at + size].view(f"V{group[3]}")[...] = _view(data, group)
        at += size
    return out


def scatter(data: Bytes, packed: Bytes, group: Group) -> None:
    """Put bytes that lie one after the other where the runs of a group are.

    Raises:
        IndexError: The group is outside of the data, or its runs overlap.
    """
    if group[2] > 1 and abs(group[1]) < group[3]:
        raise IndexError(f"runs {group} overlap")
    _view(data, group)[...] = packed.view(f"V{group[3]}")


def _view(data: Bytes, group: Group) -> np.ndarray[tuple[int], np.dtype[Any]]:
    """Each run as one element: numpy copies these whole."""
    start, step, count, length = group
    last = start + step * (count - 1)
    if count < 1 or length < 1 or min(start, last) < 0 or max(start, last) + length > data.size:
        raise IndexError(f"runs {group} are outside of {data.size} bytes")
    first = data[start : start + length].view(f"V{length}")
    return np.lib.stride_tricks.as_strided(first, (count,), (step,))
