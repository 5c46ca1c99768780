"""The field and the codes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from slurm_resil.redundancy import gf


def slow(a: int, b: int) -> int:
    result = 0
    for bit in range(8):
        if b >> bit & 1:
            result ^= a << bit
    for bit in range(14, 7, -1):
        if result >> bit & 1:
            result ^= 0x11D << (bit - 8)
    return result


def test_products_and_inverses():
    assert all(gf.multiply(a, b) == slow(a, b) for a in range(256) for b in range(0, 256, 7))
    assert all(gf.multiply(a, gf.invert(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        gf.invert(0)


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (2, 9), (3, 7), (4, 4), (5, 3), (6, 1), (2, 128), (16, 2)])
def test_every_square_part_can_be_inverted(rows, columns):
    code = gf.matrix(rows, columns)
    assert set(code[0]) == {1}
    for size in range(1, min(rows, columns, 3 if columns < 100 else 2) + 1):
        for some in itertools.combinations(range(rows), size):
            for others in itertools.combinations(range(columns), size):
                square = [[code[r][c] for c in others] for r in some]
                back = gf.inverse(square)
                for r, c in itertools.product(range(size), repeat=2):
                    value = 0
                    for k in range(size):
                        value ^= gf.multiply(square[r][k], back[k][c])
                    assert value == int(r == c)


def test_one_piece_makes_copies():
    assert gf.matrix(6, 1) == ((1,),) * 6


def test_buffers():
    data = np.random.default_rng(0).integers(0, 256, (2, 300_000 // 8 * 8), np.uint8)
    math = gf.Workspace()
    for coefficient in (1, 2, 0x53, 255):
        products = np.array([slow(coefficient, value) for value in range(256)], np.uint8)
        total = data[0].copy()
        math.add(total, data[1], coefficient)
        assert (total == data[0] ^ products[data[1]]).all()
        total = data[0].copy()
        math.scale(total, coefficient)
        assert (total == products[data[0]]).all()
    for factor in (1, 2, 4):
        total = data[0].copy()
        math.double(total, factor)
        assert (total == np.array([slow(factor, value) for value in range(256)], np.uint8)[data[0]]).all()


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (2, 0), (2, 129)])
def test_codes_that_are_none(rows, columns):
    with pytest.raises(ValueError, match="no code of"):
        gf.matrix(rows, columns)
