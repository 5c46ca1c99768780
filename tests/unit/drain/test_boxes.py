"""Boxes against numpy's own indexing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from slurm_resil.drain import boxes
from slurm_resil.format.boxes import Box


def copy(source: np.ndarray, inside: Box, shape: tuple[int, ...], outside: Box, first: int, last: int) -> np.ndarray:
    """Apply the runs to bytes."""
    runs = boxes.runs(
        shape, inside, outside, source_shape=source.shape, itemsize=source.itemsize, first=first, last=last
    )
    raw, out = source.tobytes(), bytearray(int(np.prod(shape)) * source.itemsize)
    assert runs.nbytes == max(0, last - first)
    for at, to, size in zip(runs.source, runs.target, runs.length, strict=True):
        out[to : to + size] = raw[at : at + size]
    return np.frombuffer(bytes(out), source.dtype).reshape(shape)


@pytest.mark.parametrize("seed", range(60))
def test_any_box_in_any_slices(seed):
    rng = np.random.default_rng(seed)
    dims = int(rng.integers(0, 5))
    box = tuple(int(n) for n in rng.integers(1, 5, dims))
    local = tuple(n + int(rng.choice((0, 0, 2))) for n in box)
    shape = tuple(n + int(rng.choice((0, 0, 3))) for n in box)
    inside = Box(tuple(int(rng.integers(0, b - a + 1)) for a, b in zip(box, local, strict=True)), box)
    outside = Box(tuple(int(rng.integers(0, b - a + 1)) for a, b in zip(box, shape, strict=True)), box)
    source = rng.integers(1, 30000, local).astype(np.uint16)
    expected = np.zeros(shape, np.uint16)
    expected[cut(outside)] = source[cut(inside)]
    total = int(np.prod(box)) * 2
    assert (copy(source, inside, shape, outside, 0, total) == expected).all()
    marks = sorted({0, total, *(int(m) for m in rng.integers(0, total + 1, 3))})
    pieces = [
        copy(source, inside, shape, outside, a, b).reshape(-1).view(np.uint8) for a, b in itertools.pairwise(marks)
    ]
    summed = np.sum(pieces, axis=0, dtype=np.uint8)
    assert (summed.reshape(-1).view(np.uint16).reshape(shape) == expected).all()


def cut(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))


def test_whole_rows_are_one_run():
    runs = boxes.runs(
        (10, 4), Box((0, 0), (3, 4)), Box((5, 0), (3, 4)), source_shape=(3, 4), itemsize=4, first=0, last=48
    )
    assert runs.length.tolist() == [48] and runs.target.tolist() == [80]
    columns = boxes.runs(
        (4, 6), Box((0, 0), (4, 3)), Box((0, 3), (4, 3)), source_shape=(4, 3), itemsize=2, first=0, last=24
    )
    assert columns.length.tolist() == [6] * 4
    offset, length = boxes.segments(columns.source, columns.length)
    assert (offset.tolist(), length.tolist()) == ([0], [24])


def test_places_beyond_two_to_the_32():
    side = 1 << 17
    box = Box((side - 1, 0), (1, side))
    runs = boxes.runs(
        (side, side), Box((0, 0), (1, side)), box, source_shape=(1, side), itemsize=4, first=0, last=4 * side
    )
    assert runs.target.tolist() == [(side - 1) * side * 4] and runs.length.tolist() == [4 * side]
