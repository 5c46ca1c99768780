"""Whether boxes tile a tensor."""

from __future__ import annotations

import pytest

from slurm_resil.format.boxes import Box, covered, flaw


@pytest.mark.parametrize(
    ("shape", "tiles", "fault"),
    [
        ((4,), [((0,), (4,))], ""),
        ((4,), [((0,), (2,)), ((2,), (2,))], ""),
        ((4,), [((0,), (2,)), ((3,), (1,))], "[2:3] is missing"),
        ((4,), [((0,), (3,)), ((2,), (2,))], "[2:3] is there 2 times"),
        ((4,), [((0,), (5,))], "[0:5] is not inside [4]"),
        ((4,), [((-1,), (5,))], "is not inside"),
        ((2, 4), [((0, 0), (2, 2)), ((0, 2), (1, 2)), ((1, 2), (1, 2))], ""),
        ((2, 4), [((0, 0), (2, 2)), ((0, 2), (1, 2))], "[1:2, 2:4] is missing"),
        ((2, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((1, 1), (1, 1))], "[1:2, 1:2] is there 2 times"),
        ((), [((), ())], ""),
        ((), [], "scalar is there 0 times"),
        ((3,), [((0, 0), (3, 1))], "is not inside"),
    ],
)
def test_a_flaw_is_named(shape, tiles, fault):
    said = flaw(shape, tuple(Box(*tile) for tile in tiles))
    assert fault in said and bool(fault) == bool(said)


def test_covered():
    assert covered((0, 3), [])
    assert covered((4,), [Box((0,), (2,)), Box((2,), (2,))])
    assert not covered((4,), [Box((0,), (3,))])
