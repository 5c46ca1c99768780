"""Arithmetic in GF(2^8) on whole buffers, polynomial 0x11d, and the codes that are made of it.

A code of ``rows`` parities of ``columns`` pieces is a matrix; parity ``r`` is the sum of ``matrix[r][c]`` times piece
``c``. Every square part of the matrix can be inverted, so that any ``rows`` pieces can be had back from the rest. The
first row is all ones: a parity of one row is plain XOR; with one piece all parities are copies of it. Up to three rows
are powers of 1, 2 and 4, which cost a few operations on words as the sum is put together piece by piece
(:meth:`Workspace.double`); more rows are a Cauchy matrix, and cost a look-up for every two bytes. Both are faster here
than a general codec for Python (zfec).
"""

from __future__ import annotations

import functools

import numpy as np

from slurm_resil.comm.base import Bytes

POWERS = 3  # most rows that are made of powers
MOST_COLUMNS = 128
_POLYNOMIAL = 0x11D
_WORD = 8
_CUT = 1 << 17  # bytes at once: what is worked on stays in the cache


@functools.cache
def _tables() -> tuple[list[int], list[int]]:
    """Powers of the generator 2, twice over, and logarithms."""
    exp, log, value = [0] * 510, [0] * 256, 1
    for power in range(255):
        exp[power] = exp[power + 255] = value
        log[value] = power
        value = value << 1 ^ (_POLYNOMIAL if value & 0x80 else 0)
    return exp, log


def multiply(a: int, b: int) -> int:
    """Product of two elements."""
    exp, log = _tables()
    return exp[log[a] + log[b]] if a and b else 0


def invert(a: int) -> int:
    """Inverse of an element.

    Raises:
        ZeroDivisionError: It is 0.
    """
    if not a:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    exp, log = _tables()
    return exp[255 - log[a]]


def factors(rows: int) -> tuple[int, ...] | None:
    """What each row's sum is multiplied by before the next piece is added; None if the rows are not powers."""
    return (1, 2, 4)[:rows] if rows <= POWERS else None


@functools.cache
def matrix(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """Coefficients of the parities.

    Raises:
        ValueError: Too many rows or columns.
    """
    if not (1 <= rows <= MOST_COLUMNS and 1 <= columns <= MOST_COLUMNS):
        raise ValueError(f"no code of {rows} parities of {columns} pieces")
    powers = factors(rows)
    if powers is not None:
        result = []
        for factor in powers:
            row = [1]
            for _ in range(columns - 1):
                row.insert(0, multiply(row[0], factor))
            result.append(tuple(row))
        return tuple(result)
    cauchy = [[invert((columns + r) ^ c) for c in range(columns)] for r in range(rows)]
    even = [[multiply(cauchy[r][c], invert(cauchy[0][c])) for c in range(columns)] for r in range(rows)]
    return tuple(tuple(multiply(value, invert(row[0])) for value in row) for row in even)


def inverse(square: list[list[int]]) -> list[list[int]]:
    """Inverse of a square matrix, by Gauss and Jordan.

    Raises:
        ZeroDivisionError: It has none.
    """
    size = len(square)
    work = [[*row, *(int(r == c) for c in range(size))] for r, row in enumerate(square)]
    for column in range(size):
        pivot = next((row for row in range(column, size) if work[row][column]), None)
        if pivot is None:
            raise ZeroDivisionError("the matrix has no inverse")
        work[column], work[pivot] = work[pivot], work[column]
        scale = invert(work[column][column])
        work[column] = [multiply(scale, value) for value in work[column]]
        for row in range(size):
            factor = work[row][column]
            if row != column and factor:
                work[row] = [a ^ multiply(factor, b) for a, b in zip(work[row], work[column], strict=True)]
    return [row[size:] for row in work]


@functools.cache
def _products(coefficient: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Products of all pairs of bytes."""
    single = np.array([multiply(coefficient, value) for value in range(256)], np.uint16)
    return (single[:, None] << np.uint16(8) | single[None, :]).reshape(-1)


def round_up(nbytes: int) -> int:
    """Size of the buffer that operations on so many bytes need."""
    return -(-nbytes // _WORD) * _WORD


class Workspace:
    """Operations on buffers, with memory of their own. Sizes of all buffers are multiples of 8 bytes."""

    def __init__(self) -> None:
        self._product = np.empty(_CUT, np.uint8)

    def double(self, total: Bytes, factor: int) -> None:
        """Multiply a buffer by 1, 2 or 4, in place."""
        for _ in range((1, 2, 4).index(factor)):
            for at in range(0, total.size, _CUT):
                part = total[at : at + _CUT]
                carry = self._product[: part.size]
                np.less(part.view(np.int8), 0, out=carry.view(np.bool_))  # whether the highest bit is set
                np.multiply(carry, np.uint8(_POLYNOMIAL & 0xFF), out=carry)
                np.add(part, part, out=part)
                np.bitwise_xor(part, carry, out=part)

    def add(self, total: Bytes, piece: Bytes, coefficient: int = 1) -> None:
        """Add a piece, times a coefficient, to a buffer of the same size, in place."""
        if coefficient == 1:
            np.bitwise_xor(total.view(np.uint64), piece.view(np.uint64), out=total.view(np.uint64))
            return
        table = _products(coefficient)
        for at in range(0, total.size, _CUT):
            part = total[at : at + _CUT]
            product = self._product[: part.size].view(np.uint16)
            np.take(table, piece[at : at + _CUT].view(np.uint16), out=product, mode="clip")
            np.bitwise_xor(part.view(np.uint16), product, out=part.view(np.uint16))

    def scale(self, total: Bytes, coefficient: int) -> None:
        """Multiply a buffer by a coefficient, in place."""
        if coefficient == 1:
            return
        table = _products(coefficient)
        for at in range(0, total.size, _CUT):
            part = total[at : at + _CUT].view(np.uint16)
            product = self._product[: part.nbytes].view(np.uint16)
            np.take(table, part, out=product, mode="clip")
            part[:] = product
