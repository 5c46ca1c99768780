"""Compares two checkpoints tensor by tensor: which came, went or changed, and by how much. Memory is bounded.

Values are compared as numbers, in double precision, whatever their types: a bfloat16 and a float32 of one value are
equal, and so are two NaNs, and both zeros. Types that are no numbers (text, dates, packed four-bit floats) are compared
as bytes of elements.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slurm_resil.core.errors import DataError
from slurm_resil.drain import peek
from slurm_resil.format import layout, safetensors
from slurm_resil.format.decode import Array
from slurm_resil.format.manifest import DrainedItem, Item

ELEMENTS = 1 << 20  # that are looked at at once
_PATHS = 100  # of plain values that differ, that are named
_NUMBERS = "biufc"

Key = tuple[int | None, str]
"""Rank that owns a tensor, None for one of all; and its name."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a tensor that lies in one place.

    Attributes:
        start: Where it begins in the whole tensor, elements.
        shape: Its shape.
        inside: Where it begins in what ``item`` describes.
        item: Type and shape of what is read.
        opened: Opens it, to read verified bytes of the item.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    inside: tuple[int, ...]
    item: Item | DrainedItem
    opened: Callable[[], AbstractContextManager[peek.Read]]

    def index(self, box: tuple[tuple[int, int], ...]) -> peek.Index:
        """Elements of the item that a box of the whole tensor (first, stop of each dimension) has."""
        places = zip(box, self.start, self.inside, strict=True)
        return tuple(range(first - start + at, stop - start + at) for (first, stop), start, at in places)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of a checkpoint; ``pieces`` may be less than all of it, where the rest is out of reach."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def whole(item: Item | DrainedItem, opened: Callable[[], AbstractContextManager[peek.Read]]) -> Tensor:
    """A tensor that lies in one place."""
    zero = (0,) * len(item.shape)
    piece = Piece(start=zero, shape=item.shape, inside=zero, item=item, opened=opened)
    return Tensor(dtype=item.dtype, shape=item.shape, pieces=(piece,))


@dataclass(kw_only=True)
class Change:
    """What became of one tensor.

    Attributes:
        name: Its name.
        rank: Whose it is, None for one of all ranks.
        what: ``added``, ``removed``, ``shape``, ``changed`` (values, type or both) or ``same``.
        dtypes: Before and after; None where it is not there.
        shapes: The same.
        elements: How many there are, of the shape that both have.
        compared: How many were looked at.
        differing: How many have another value.
        odd: How many of these are not finite on one side.
        max_abs: Largest difference of two finite numbers; None for what is no number.
        relative_l2: L2 norm of the difference over that of A, of finite numbers; None as above.
        nan: How many are no number, on each side.
        infinite: How many are infinite, on each side.
        paths: Of plain values: which differ, with both texts.
    """

    name: str
    rank: int | None
    what: str
    dtypes: tuple[str | None, str | None]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    elements: int = 0
    compared: int = 0
    differing: int = 0
    odd: int = 0
    max_abs: float | int | None = None
    relative_l2: float | None = None
    nan: tuple[int, int] = (0, 0)
    infinite: tuple[int, int] = (0, 0)
    paths: list[tuple[str, str, str]] = field(default_factory=list)

    def beyond(self, tolerance: float) -> bool:
        """Whether it differs by more than numbers of a size: ``added``, ``removed``, shape and type always do."""
        if self.what not in ("same", "changed") or not _one_type(*self.dtypes):
            return True
        if self.max_abs is None:
            return self.differing > 0 or bool(self.paths)
        return self.odd > 0 or self.max_abs > tolerance


def compare(a: Mapping[Key, Tensor], b: Mapping[Key, Tensor], done: Callable[[int], None]) -> Iterator[Change]:
    """Compare two checkpoints.

    Args:
        a: Tensors of the one.
        b: Tensors of the other.
        done: Told the bytes of A that were looked at.

    Yields:
        What became of each tensor of either, in the order of names.

    Raises:
        DataError: What was read is damaged.
    """
    for rank, name in sorted(a.keys() | b.keys(), key=lambda key: (key[0] is not None, key[0] or 0, key[1])):
        one, other = a.get((rank, name)), b.get((rank, name))
        dtypes, shapes = _both(one, other, "dtype"), _both(one, other, "shape")
        change = Change(name=name, rank=rank, what="same", dtypes=dtypes, shapes=shapes)
        if one is None or other is None:
            change.what = "added" if one is None else "removed"
        elif "json" in dtypes:
            _compare_values(change, one, other)
        elif one.shape != other.shape:
            change.what = "shape"
        else:
            _compare_tensors(change, one, other, done)
        yield change


def _both(one: Tensor | None, other: Tensor | None, name: str) -> Any:
    return tuple(None if tensor is None else getattr(tensor, name) for tensor in (one, other))


def _compare_tensors(change: Change, one: Tensor, other: Tensor, done: Callable[[int], None]) -> None:
    change.elements = math.prod(one.shape)
    numbers = all(_numeric(tensor.dtype) for tensor in (one, other))
    if not numbers and one.dtype != other.dtype:
        change.what = "changed"  # bytes of two types have nothing to do with each other
        return
    sums = _Sums(numbers=numbers)
    size = layout.itemsize(one.dtype)
    for mine, theirs, box in _shared(one, other):
        with mine.opened() as read_mine, theirs.opened() as read_theirs:
            left = peek.parts(mine.item, mine.index(box), read_mine, raw=not numbers)
            right = peek.parts(theirs.item, theirs.index(box), read_theirs, raw=not numbers)
            for x, y in _together(left, right, 1 if numbers else size):
                sums.add(x, y, size)
                done(x.size * size if numbers else x.size)
    sums.into(change)
    if change.differing or not _one_type(one.dtype, other.dtype):
        change.what = "changed"


def _one_type(one: str | None, other: str | None) -> bool:
    """Whether two types are one, which numpy and torch only call otherwise."""
    names = [None if dtype is None else safetensors.dtype_name(dtype) for dtype in (one, other)]
    return one == other or (names[0] is not None and names[0] == names[1])


def _numeric(dtype: str) -> bool:
    """Whether elements are numbers that :func:`slurm_resil.format.decode.decode` knows."""
    kind, _, name = dtype.partition(".")
    if kind == "numpy":
        return name.lstrip("<>|=")[:1] in _NUMBERS
    return kind == "torch" and name != "float4_e2m1fn_x2"


def _shared(one: Tensor, other: Tensor) -> Iterator[tuple[Piece, Piece, tuple[tuple[int, int], ...]]]:
    """Boxes that a piece of each has, none twice: replicated pieces have the same boxes."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    for mine, theirs in itertools.product(one.pieces, other.pieces):
        box = tuple(
            (max(s, t), min(s + m, t + n))
            for s, m, t, n in zip(mine.start, mine.shape, theirs.start, theirs.shape, strict=True)
        )
        if all(first < stop for first, stop in box) and box not in seen:
            seen.add(box)
            yield mine, theirs, box


def _together(left: Iterator[Array], right: Iterator[Array], unit: int) -> Iterator[tuple[Array, Array]]:
    """Cut two streams of the same elements into pairs of the same lengths, of bounded size."""
    x = y = np.empty(0, np.uint8)
    while True:
        x = x if x.size else next(left, x)
        y = y if y.size else next(right, y)
        count = min(x.size, y.size, ELEMENTS * unit)
        if not count:
            if x.size or y.size:
                raise DataError("two tensors of one shape have different numbers of elements")
            return
        yield x[:count], y[:count]
        x, y = x[count:], y[count:]


class _Sums:
    """What is known of the elements that were compared."""

    def __init__(self, *, numbers: bool) -> None:
        self._numbers = numbers
        self._compared = self._differing = self._odd = 0
        self._most: float | int = 0
        self._difference = self._norm = np.longdouble(0)
        self._nan, self._infinite = [0, 0], [0, 0]

    def add(self, x: Array, y: Array, size: int) -> None:
        """Compare elements; of what are no numbers their bytes."""
        if not self._numbers:
            self._compared += x.size // size
            self._differing += int((x != y).reshape(-1, size).any(axis=1).sum())
            return
        self._compared += x.size
        with np.errstate(all="ignore"):
            if x.dtype.kind in "biu" and y.dtype.kind in "biu":
                self._add_whole(*_alike(x, y))
            else:
                self._add_real(x, y)

    def _add_whole(self, x: Array, y: Array) -> None:
        apart = x != y
        count = int(apart.sum())
        self._norm += _squares(x.astype(np.float64))
        if not count:
            return
        self._differing += count
        x, y = x[apart], y[apart]
        if x.dtype.kind == "f":  # integers that have no type in common
            distance: Array = np.abs(x - y)
        else:  # exact: the difference of any two fits the unsigned type
            unsigned = x.dtype.str.replace("i", "u")
            distance = np.where(x > y, x.view(unsigned) - y.view(unsigned), y.view(unsigned) - x.view(unsigned))
        self._most = max(self._most, distance.max().item())
        self._difference += _squares(distance.astype(np.float64))

    def _add_real(self, x: Array, y: Array) -> None:
        wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
        x, y = x.astype(wide), y.astype(wide)
        nan_x, nan_y, finite_x, finite_y = np.isnan(x), np.isnan(y), np.isfinite(x), np.isfinite(y)
        for side, nan, finite in ((0, nan_x, finite_x), (1, nan_y, finite_y)):
            self._nan[side] += int(nan.sum())
            self._infinite[side] += int((~finite & ~nan).sum())
        apart = (x != y) & ~(nan_x & nan_y)
        finite = finite_x & finite_y
        self._differing += int(apart.sum())
        self._odd += int((apart & ~finite).sum())
        if not finite.all():
            x, y = x[finite], y[finite]
        self._norm += _squares(x)
        distance = np.abs(x - y)
        if distance.size and (most := distance.max().item()) > 0:
            self._most = max(self._most, most)
            self._difference += _squares(distance)

    def into(self, change: Change) -> None:
        """Write down what was found."""
        change.compared, change.differing, change.odd = self._compared, self._differing, self._odd
        change.nan, change.infinite = (self._nan[0], self._nan[1]), (self._infinite[0], self._infinite[1])
        if self._numbers:
            change.max_abs = self._most
            difference, norm = float(np.sqrt(self._difference)), float(np.sqrt(self._norm))
            change.relative_l2 = 0.0 if not difference else difference / norm if norm else math.inf


def _alike(x: Array, y: Array) -> tuple[Array, Array]:
    if x.dtype == y.dtype and x.dtype.kind != "b" and x.dtype.isnative:
        return x, y
    common = np.result_type(*(np.uint8 if one.dtype.kind == "b" else one.dtype for one in (x, y))).newbyteorder("=")
    return x.astype(common), y.astype(common)


def _squares(x: Array) -> np.longdouble:
    """Sum of squares of magnitudes, also of what overflows or vanishes when it is squared."""
    x = np.abs(x)
    total = np.dot(x, x)
    if (np.isfinite(total) and total > 1e-280) or not x.any():
        return np.longdouble(total)
    return np.longdouble(np.square(x.astype(np.longdouble)).sum())


def _compare_values(change: Change, one: Tensor, other: Tensor) -> None:
    """Compare the plain values of two ranks by what they mean, not by their text."""
    trees = []
    for tensor in (one, other):
        if tensor.dtype != "json":
            change.what = "changed"
            return
        text = bytearray()
        for piece in tensor.pieces:
            with piece.opened() as read:
                text += read(0, piece.item.nbytes).tobytes()
        try:
            trees.append(json.loads(text))
        except ValueError as error:
            raise DataError(f"the values of rank {change.rank} are not JSON: {error}", fault="torn") from error
    change.paths = list(itertools.islice(_apart(trees[0], trees[1], ()), _PATHS))
    if trees[0] != trees[1]:
        change.what = "changed"


def _apart(a: Any, b: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """Places in two trees of values that differ, with both texts."""
    if a == b:
        return
    left, right = _entries(a), _entries(b)
    if left is None or right is None or not left.keys() & right.keys():
        yield "/".join(path) or "all", _short(a), _short(b)
        return
    for key in dict.fromkeys((*left, *right)):
        at = (*path, key) if key not in ("of", "$") else path
        if key not in left or key not in right:
            yield "/".join(at), _short(left[key]) if key in left else "", _short(right[key]) if key in right else ""
        else:
            yield from _apart(left[key], right[key], at)


def _entries(node: Any) -> dict[str, Any] | None:
    """Children of a node by their names; pairs count as entries of a mapping."""
    if isinstance(node, dict):
        return node
    if not isinstance(node, list):
        return None
    pairs = all(isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) for entry in node)
    return {entry[0]: entry[1] for entry in node} if pairs and node else {str(i): entry for i, entry in enumerate(node)}


def _short(node: Any) -> str:
    text = json.dumps(node, sort_keys=True)
    return text if len(text) <= 120 else f"{text[:117]}..."


def count(changes: Sequence[Change]) -> dict[str, int]:
    """How many tensors there are of each kind."""
    kinds = ("same", "changed", "shape", "added", "removed")
    return {kind: sum(change.what == kind for change in changes) for kind in kinds}
