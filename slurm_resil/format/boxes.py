"""Boxes of tensors, and whether they tile one. Pure; shapes and starts in elements."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


@functools.lru_cache(maxsize=4096)
def flaw(shape: Shape, boxes: tuple[Box, ...]) -> str:
    """Say why boxes do not tile a tensor exactly once; empty if they do.

    Args:
        shape: Shape of the tensor.
        boxes: Distinct boxes, none empty.
    """
    for box in boxes:
        if not inside(box, shape):
            return f"{words(box)} is not inside {list(shape)}"
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
    return f"{words(place)} is {'missing' if count[cell] == 0 else f'there {int(count[cell])} times'}"


def inside(box: Box, shape: Shape) -> bool:
    """Whether a box lies in a tensor of a shape."""
    return len(box.start) == len(box.shape) == len(shape) and all(
        at >= 0 and 0 <= size <= limit - at for at, size, limit in zip(box.start, box.shape, shape, strict=True)
    )


def words(box: Box) -> str:
    """A box for people: ``[0:4, 2:3]``."""
    return "[" + ", ".join(f"{at}:{at + size}" for at, size in zip(box.start, box.shape, strict=True)) + "]"


def covered(shape: Shape, parts: Sequence[Box]) -> bool:
    """Whether boxes tile a (local) tensor exactly once."""
    return math.prod(shape) == 0 or flaw(shape, tuple(part for part in parts if part.volume)) == ""
