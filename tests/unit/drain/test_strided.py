"""Strided runs, slices of boxes, windows of reads, and work done ahead, against the obvious."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from slurm_resil.drain import between, boxes, readback, strided
from slurm_resil.drain.ahead import PAGE_BYTES, ahead
from slurm_resil.format.boxes import Box

SEEDS = range(80)


def runs(seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Runs that do not overlap, many of them at equal distances; and the size of the data."""
    draw = random.Random(seed)
    offset, length, at = [], [], draw.randint(0, 5)
    for _ in range(draw.randint(1, 5)):
        count, size, hole = draw.randint(1, 6), draw.randint(1, 9), draw.randint(0, 4)
        for _ in range(count):
            offset.append(at)
            length.append(size)
            at += size + hole
        at += draw.randint(0, 3)
    return np.array(offset, np.int64), np.array(length, np.int64), at


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_are_the_runs(seed):
    offset, length, _ = runs(seed)
    found = [(start + step * i, size) for start, step, n, size in strided.groups(offset, length) for i in range(n)]
    assert found == list(zip(offset.tolist(), length.tolist(), strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_gather_and_scatter(seed):
    offset, length, size = runs(seed)
    data = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    packed = strided.gather(data, offset, length)
    pairs = list(zip(offset.tolist(), length.tolist(), strict=True))
    assert packed.tobytes() == b"".join(data[at : at + count].tobytes() for at, count in pairs)
    out, expected = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    for at, count in pairs:
        expected[at : at + count] = data[at : at + count]
    at = 0
    for group in strided.groups(offset, length):
        strided.scatter(out, packed[at : at + group[2] * group[3]], group)
        at += group[2] * group[3]
    assert np.array_equal(out, expected)


def test_regular_runs_are_one_group():
    offset, length = np.arange(7, 7000, 10), np.full(700, 4)
    assert list(strided.groups(offset, length)) == [(7, 10, 700, 4)]
    nested = (np.arange(50)[:, None] * 1000 + np.arange(20) * 10).reshape(-1)
    assert len(list(strided.groups(nested, np.full(1000, 4)))) == 50


@pytest.mark.parametrize("group", [(90, 0, 1, 11), (0, 10, 11, 5), (-1, 0, 1, 2), (20, -15, 3, 4), (0, 0, 0, 4)])
def test_runs_outside_of_the_data_are_refused(group):
    with pytest.raises(IndexError):
        strided.scatter(np.zeros(100, np.uint8), np.zeros(max(group[2], 1) * group[3], np.uint8), group)


def test_runs_that_overlap_are_refused():
    with pytest.raises(IndexError, match="overlap"):
        strided.scatter(np.zeros(100, np.uint8), np.zeros(10, np.uint8), (0, 4, 2, 5))


@pytest.mark.parametrize("itemsize", [1, 2, 8])
@pytest.mark.parametrize("seed", SEEDS)
def test_place_of_a_byte_in_the_stream_of_a_box(seed, itemsize):
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 4)))
    start = tuple(draw.randrange(size) for size in shape)
    box = Box(start, tuple(draw.randint(1, limit - at) for limit, at in zip(shape, start, strict=True)))
    mask = np.zeros((*shape, itemsize), bool)
    mask[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] = True
    flat = mask.reshape(-1)
    for offset in range(flat.size + 1):
        assert boxes.before(shape, box, itemsize, offset) == int(flat[:offset].sum())
    inside = np.flatnonzero(flat)
    assert boxes.span(shape, box, itemsize) == (inside[0], inside[-1] + 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_windows_read_everything_once(seed):
    draw = random.Random(seed)
    pairs = [(draw.randint(0, 200_000), draw.randint(0, 60_000)) for _ in range(draw.randint(0, 8))]
    limit, size = 230_001, 8 * PAGE_BYTES
    ranges = [(begin, min(begin + count, limit)) for begin, count in pairs]
    seen = np.zeros(limit, int)
    found = readback.windows(ranges, size, limit)
    assert found == sorted(found)
    for begin, end in found:
        assert begin % PAGE_BYTES == 0 and begin // size == (end - 1) // size
        seen[begin:end] += 1
    assert seen.max(initial=0) <= 1
    assert all(seen[begin:end].all() for begin, end in ranges)


@pytest.mark.parametrize("seed", SEEDS)
def test_ranges_within_another(seed):
    draw = random.Random(seed)
    pairs = [(draw.randint(1, 9), draw.randint(0, 9)) for _ in range(draw.randint(0, 8))]
    begin, end = draw.randint(0, 99), draw.randint(0, 99)
    ranges, at = [], 0
    for hole, count in pairs:
        ranges.append((at + hole, at + hole + count + 1))
        at = ranges[-1][1]
    expected = {byte for a, b in ranges for byte in range(a, b) if begin <= byte < end}
    found = between.within(ranges, begin, end)
    assert {byte for a, b in found for byte in range(a, b)} == expected
    assert found == sorted(found)


def test_one_job_runs_ahead_and_no_more():
    begun: list[int] = []
    third = threading.Event()

    def job(number: int) -> int:
        begun.append(number)
        if number == 2:
            third.set()
        return number

    results = ahead(lambda number=number: job(number) for number in range(5))
    assert next(results) == 0
    assert next(results) == 1  # so job 1 was done: 2 may run now, 3 must not
    assert third.wait(10)
    results.close()
    assert begun == [0, 1, 2]


def test_an_error_comes_when_its_result_is_asked_for():
    def bad() -> int:
        raise OSError("no")

    results = ahead([lambda: 1, bad, lambda: 3])
    assert next(results) == 1
    with pytest.raises(OSError, match="no"):
        next(results)
    assert list(results) == []
    assert list(ahead([])) == []
