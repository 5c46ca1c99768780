"""Boxes of tensors as byte runs, and whether boxes tile a tensor. Pure; shapes and starts in elements."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_resil.comm.base import Int64s, Runs

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a tensor.

    Attributes:
        start: First element of each dimension.
        shape: Size in each dimension.
    """

    start: Shape
    shape: Shape

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def strides(shape: Shape) -> Shape:
    """Row-major strides in elements."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


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


def _base(box: Box, shape: Shape) -> int:
    return sum(at * step for at, step in zip(box.start, strides(shape), strict=True))


def segments(offset: Int64s, length: Int64s) -> tuple[Int64s, Int64s]:
    """Join ranges that follow each other without a gap; the order stays."""
    if offset.size == 0:
        return offset, length
    first = np.flatnonzero(np.concatenate(([True], offset[1:] != offset[:-1] + length[:-1])))
    return offset[first], np.add.reduceat(length, first)


@functools.lru_cache(maxsize=4096)
def flaw(shape: Shape, boxes: tuple[Box, ...]) -> str:
    """Say why boxes do not tile a tensor exactly once; empty if they do.

    Args:
        shape: Shape of the tensor.
        boxes: Distinct boxes, none empty.
    """
    for box in boxes:
        if len(box.start) != len(shape) or any(
            at < 0 or at + size > limit for at, size, limit in zip(box.start, box.shape, shape, strict=True)
        ):
            return f"{_words(box)} is not inside {list(shape)}"
    if not shape:
        return "" if len(boxes) == 1 else f"the scalar is there {len(boxes)} times"
    edges = [
        np.unique([0, limit, *(b.start[d] for b in boxes), *(b.start[d] + b.shape[d] for b in boxes)])
        for d, limit in enumerate(shape)
    ]
    count = np.zeros([len(edge) - 1 for edge in edges], np.int32)
    for box in boxes:
        at = tuple(
            slice(int(np.searchsorted(edge, start)), int(np.searchsorted(edge, start + size)))
            for edge, start, size in zip(edges, box.start, box.shape, strict=True)
        )
        count[at] += 1
    wrong = np.argwhere(count != 1)
    if wrong.size == 0 and count.size:
        return ""
    cell = tuple(int(i) for i in wrong[0])
    place = Box(
        tuple(int(edge[i]) for edge, i in zip(edges, cell, strict=True)),
        tuple(int(edge[i + 1] - edge[i]) for edge, i in zip(edges, cell, strict=True)),
    )
    return f"{_words(place)} is {'missing' if count[cell] == 0 else f'there {int(count[cell])} times'}"


def _words(box: Box) -> str:
    return "[" + ", ".join(f"{at}:{at + size}" for at, size in zip(box.start, box.shape, strict=True)) + "]"


def covered(shape: Shape, parts: Sequence[Box]) -> bool:
    """Whether boxes tile a (local) tensor exactly once."""
    return math.prod(shape) == 0 or flaw(shape, tuple(part for part in parts if part.volume)) == ""
