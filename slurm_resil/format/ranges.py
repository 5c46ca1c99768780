"""Which ranges of a stored tensor's bytes a part of it lies in. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slurm_resil.format.manifest import Extent

ROW_BYTES = 1 << 20  # rows of at least this size are read one by one where only a part of each is needed
Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # local start, global start, shape


class Range(NamedTuple):
    """A range of a tensor's bytes that is read at once, and the box that lies in it.

    Attributes:
        local: Where the box begins in the local tensor, elements.
        start: First byte, counted from the tensor's first.
        nbytes: Number of bytes.
        shape: Shape of the box, elements.
        strides: Its strides in the range, bytes.
    """

    local: tuple[int, ...]
    start: int
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def ranges(shape: Sequence[int], itemsize: int, extents: Sequence[Extent] | None = None) -> Iterator[Range]:
    """Cut what is wanted of a tensor into ranges of its bytes.

    Args:
        shape: Shape of the whole tensor, which is stored contiguously and row-major.
        itemsize: Size of an element, bytes.
        extents: What is wanted of it; None: all of it.
    """
    strides = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    if extents is None:
        zero = (0,) * len(shape)
        extents = (Extent(local=zero, start=zero, shape=tuple(shape)),)
    for extent in extents:
        if 0 not in extent.shape:
            for local, start, box in cut((extent.local, extent.start, extent.shape), shape, strides):
                first = sum(s * stride for s, stride in zip(start, strides, strict=True))
                last = sum((n - 1) * stride for n, stride in zip(box, strides, strict=True))
                yield Range(local, first, last + itemsize, box, tuple(strides))


def cut(box: Box, shape: Sequence[int], strides: Sequence[int], dim: int = 0) -> Iterator[Box]:
    """Cut a box so that no range in the file spans much that is not wanted, and none is huge."""
    local, start, size = box
    inner_full = all(size[d] == shape[d] for d in range(dim + 1, len(shape)))
    if dim >= len(shape):
        yield box
        return
    if not inner_full and strides[dim] >= ROW_BYTES:
        for index in range(size[dim]):
            row = (_moved(local, dim, index), _moved(start, dim, index), (*size[:dim], 1, *size[dim + 1 :]))
            yield from cut(row, shape, strides, dim + 1)
        return
    rows = max(1, 16 * ROW_BYTES // max(strides[dim], 1))
    for index in range(0, size[dim], rows):
        count = min(rows, size[dim] - index)
        yield _moved(local, dim, index), _moved(start, dim, index), (*size[:dim], count, *size[dim + 1 :])


def _moved(at: Sequence[int], dim: int, by: int) -> tuple[int, ...]:
    return (*at[:dim], at[dim] + by, *at[dim + 1 :])
