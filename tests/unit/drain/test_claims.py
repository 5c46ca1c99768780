"""Sets of byte ranges, against sets of bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from slurm_resil.comm.base import Runs
from slurm_resil.drain.claims import Claims


def made(pairs: list[tuple[int, int]]) -> Claims:
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return Claims.of(table[:, 0], table[:, 1])


def members(claims: Claims) -> set[int]:
    found: set[int] = set()
    before = -1
    for start, end in zip(claims.starts.tolist(), claims.ends.tolist(), strict=True):
        assert before < start < end  # ascending, none empty, none touching the next
        found |= set(range(start, end))
        before = end
    return found


def drawn(rng: random.Random) -> list[tuple[int, int]]:
    return [(rng.randrange(200), rng.choice((0, 1, 2, 7, 30))) for _ in range(rng.randrange(12))]


@pytest.mark.parametrize("seed", range(60))
def test_sets_are_what_sets_of_bytes_are(seed):
    rng = random.Random(seed)
    first, second = drawn(rng), drawn(rng)
    one, other = made(first), made(second)
    expected = {byte for start, size in first for byte in range(start, start + size)}
    assert members(one) == expected and one.nbytes == len(expected)
    assert members(Claims.union([one, other])) == members(one) | members(other)
    assert members(one.gaps(240)) == set(range(240)) - members(one)
    assert members(Claims.unpack(one.pack())) == members(one)


@pytest.mark.parametrize("seed", range(60))
def test_runs_are_cut_to_what_is_in_the_set(seed):
    rng = random.Random(seed)
    claims = made(drawn(rng))
    runs = made(drawn(rng))
    order = np.array(rng.sample(range(runs.starts.size), runs.starts.size), np.int64)
    target, length = runs.starts[order], (runs.ends - runs.starts)[order]
    source = 1000 + np.cumsum(length) - length
    whole = Runs(source=source, target=target, length=length)
    place = {int(t) + i: int(s) + i for s, t, n in zip(source, target, length, strict=True) for i in range(n)}
    for part, left in ((claims.cut(whole), members(claims)), (claims.gaps().cut(whole), None)):
        seen = {
            int(t) + i: int(s) + i
            for s, t, n in zip(part.source, part.target, part.length, strict=True)
            for i in range(n)
        }
        wanted = place.keys() & left if left is not None else place.keys() - members(claims)
        assert seen == {at: place[at] for at in wanted}
        assert part.nbytes == len(wanted)


def test_a_column_of_a_tensor_is_one_row():
    starts = np.arange(1000, dtype=np.int64) * 64 + 8
    column = Claims.of(starts, np.full(1000, 16))
    assert column.pack() == [[8, 16, 64, 1000]]
    both = Claims.union([column, made([(100_000, 5000)])])
    assert len(both.pack()) == 2 and members(Claims.unpack(both.pack())) == members(both)


@pytest.mark.parametrize("rows", [[[1, 2, 3]], [[-1, 2, 0, 1]], [["a", 1, 0, 1]]])
def test_rows_that_are_none(rows):
    with pytest.raises(ValueError, match=r"."):
        Claims.unpack(rows)
