"""Boxes of tensors as byte runs. Pure; shapes and starts in elements."""

from __future__ import annotations

import numpy as np

from slurm_resil.comm.base import Int64s, Runs
from slurm_resil.format.boxes import Box, Shape, strides


def runs(shape: Shape, source: Box, target: Box, *, source_shape: Shape, itemsize: int, first: int, last: int) -> Runs:
    """Byte runs that copy a slice of a box from one row-major tensor into another.

    The bytes of the box in row-major order make a stream; the slice is ``[first, last)`` of it.

    Args:
        shape: Shape of the target tensor.
        source: The box inside the source tensor.
        target: The same box inside the target tensor.
        source_shape: Shape of the source tensor.
        itemsize: Size of an element, bytes.
        first: Start of the slice, bytes; any value, also inside an element.
        last: End of the slice, bytes.

    Returns:
        Runs with offsets from the start of each tensor, in the order of the stream.
    """
    box = target.shape
    inner, length = block(box, shape, source_shape, itemsize)
    if first >= last or length == 0:
        empty = np.empty(0, np.int64)
        return Runs(source=empty, target=empty, length=empty)
    index = np.arange(first // length, -(-last // length), dtype=np.int64)
    begin = _base(source, source_shape) * itemsize + np.zeros_like(index)
    end = _base(target, shape) * itemsize + np.zeros_like(index)
    rest = index.copy()
    in_source, in_target = strides(source_shape), strides(shape)
    for d in reversed(range(inner)):
        rest, at = np.divmod(rest, box[d])
        begin += at * (in_source[d] * itemsize)
        end += at * (in_target[d] * itemsize)
    lengths = np.full_like(index, length)
    cut = first - int(index[0]) * length
    begin[0] += cut
    end[0] += cut
    lengths[0] -= cut
    lengths[-1] -= (int(index[-1]) + 1) * length - last
    return Runs(source=begin, target=end, length=lengths)


def block(box: Shape, shape: Shape, source_shape: Shape, itemsize: int) -> tuple[int, int]:
    """Largest contiguous block of a box in both tensors: its outermost dimension, and its size in bytes."""
    inner, length = len(box), itemsize
    while inner > 0:
        inner -= 1
        length *= box[inner]
        if not box[inner] == shape[inner] == source_shape[inner]:
            break
    return inner, length


def before(shape: Shape, box: Box, itemsize: int, offset: int) -> int:
    """Bytes of a box's stream that lie before a byte of its tensor.

    Args:
        shape: Shape of the tensor.
        box: The box inside it.
        itemsize: Size of an element, bytes.
        offset: Byte of the tensor, up to its size.
    """
    element, rest = divmod(offset, itemsize)
    if not shape:
        return min(offset, itemsize)
    volume, elements = box.volume, 0
    for start, size, step in zip(box.start, box.shape, strides(shape), strict=True):
        if not size:
            return 0
        volume //= size
        at, element = divmod(element, max(step, 1))
        if at < start:
            return elements * itemsize
        if at >= start + size:
            return (elements + size * volume) * itemsize
        elements += (at - start) * volume
    return elements * itemsize + rest


def span(shape: Shape, box: Box, itemsize: int) -> tuple[int, int]:
    """First byte of a box in its tensor, and the byte after its last one; the box is not empty."""
    last = Box(tuple(at + size - 1 for at, size in zip(box.start, box.shape, strict=True)), box.shape)
    return _base(box, shape) * itemsize, (_base(last, shape) + 1) * itemsize


def _base(box: Box, shape: Shape) -> int:
    return sum(at * step for at, step in zip(box.start, strides(shape), strict=True))


def segments(offset: Int64s, length: Int64s) -> tuple[Int64s, Int64s]:
    """Join ranges that follow each other without a gap; the order stays."""
    if offset.size == 0:
        return offset, length
    first = np.flatnonzero(np.concatenate(([True], offset[1:] != offset[:-1] + length[:-1])))
    return offset[first], np.add.reduceat(length, first)
