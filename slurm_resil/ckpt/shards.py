"""All sealed shards of one iteration in one directory, as a source for any rank of any world.

Sharded tensors are put together from the extents of the shards; only the blocks that a rank needs are read, and each is
compared with its hash first. What several shards hold (replicas of a part, plain tensors that are equal on all ranks)
is taken from the first that is whole.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from slurm_resil.ckpt import seal
from slurm_resil.ckpt.source import Source, Want, copy_in, memory_of
from slurm_resil.ckpt.state import Array
from slurm_resil.core.errors import DataError
from slurm_resil.format import blocks, boxes, layout, world
from slurm_resil.format import stamp as stamps
from slurm_resil.format.manifest import Extent, Item, ShardManifest, digest
from slurm_resil.format.ranges import Box, cut


class ShardsSource(Source):
    """Shards of all ranks of one iteration, see the module. Use as a context manager.

    The file's structure around the items is not looked at: no byte of it comes into a state.

    Args:
        job_dir: Job's directory in the burst buffer that all of them are in.
        manifests: One of each rank of the world that saved.
        rank: Whose private items are wanted: a rank of that world, or None where they are out of reach.

    Attributes:
        read_bytes: Bytes that were read and compared with their hashes.
        wanted_bytes: Bytes that were asked for.
        flaws: What was found bad and taken from another shard instead.

    Raises:
        DataError: The manifests do not make one checkpoint.
    """

    def __init__(self, job_dir: str, manifests: Sequence[ShardManifest], rank: int | None) -> None:
        world.fit(manifests)
        self._slots = [_Slot(job_dir, manifest) for manifest in sorted(manifests, key=lambda one: one.rank)]
        self._rank = rank
        self._having: dict[str, list[tuple[_Slot, Item]]] = {}
        for slot in self._slots:
            for item in slot.manifest.items:
                self._having.setdefault(item.name, []).append((slot, item))
        self._held: dict[str, _Held | None] = {}
        self._stack = contextlib.ExitStack()
        self.wanted_bytes = 0
        self.flaws: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for slot in self._slots:
            slot.forget()
        self._stack.__exit__(kind, error, trace)

    @property
    def read_bytes(self) -> int:
        """See the class."""
        return sum(slot.read_bytes for slot in self._slots)

    def is_global(self, name: str) -> bool:
        """Whether an item is one for all ranks."""
        held = self._find(name)
        return held is not None and not held.private

    def values(self, rank: int) -> Any:
        """Plain values of a rank of the old world, a tree."""
        return self._slots[rank].manifest.values

    def misfit(self, want: Want) -> str:
        """See Source.

        Raises:
            DataError: The shards do not fit together: a part is missing, or replicas differ.
        """
        held = self._find(want.name)
        if held is None:
            raise DataError(f"the values of {self._where} name {want.name}, the items do not", fault="torn")
        if held.dtype != want.dtype:
            return f"{want.where}: {held.dtype} in the checkpoint, {want.dtype} in the state"
        if held.shape != want.global_shape:
            return f"{want.where}: shape {held.shape} in the checkpoint, {want.global_shape} in the state"
        return ""

    def verify(self, wants: Sequence[Want]) -> None:
        """See Source."""
        for want in wants:
            for part, box, _ in self._pieces(want):
                self._sound(part, box)

    def fill(self, want: Want, target: torch.Tensor | Array) -> None:
        """See Source."""
        unit, size = layout.itemsize(want.dtype), layout.nbytes(want.dtype, want.local_shape)
        if size == 0:
            return
        shape = (*want.local_shape, unit)
        direct = memory_of(target)
        local = np.empty(shape, np.uint8) if direct is None else direct.reshape(shape)
        for part, box, to in self._pieces(want):
            slot, item, extent = self._sound(part, box)
            there = slot.array(item, unit)
            local[_slices(to, box.shape)] = there[_slices(_inside(extent, box), box.shape)]
        if direct is None:
            copy_in(target, local.reshape(-1))
        self.wanted_bytes += size

    def check_again(self) -> None:
        """Check that no slot that was read from was written meanwhile.

        Raises:
            DataError: One was.
        """
        for slot in self._slots:
            slot.check_again()

    @property
    def _where(self) -> str:
        return f"the shards of iteration {self._slots[0].manifest.iteration} in {self._slots[0].job_dir}"

    def _find(self, name: str) -> _Held | None:
        if name not in self._held:
            having = self._having.get(name)
            self._held[name] = _hold(name, having, self._rank) if having else None
        return self._held[name]

    def _pieces(self, want: Want) -> Iterator[tuple[_Part, boxes.Box, tuple[int, ...]]]:
        """Cut what is wanted along the parts that the shards hold.

        Yields:
            A part; a box of it, in the whole; where the box begins in the place that is to be filled.
        """
        held = self._find(want.name)
        if held is None:
            return
        zero = (0,) * len(held.shape)
        whole = (Extent(local=zero, start=zero, shape=held.shape),)
        for extent in whole if want.whole else want.extents:
            for part in held.parts:
                box = _common(part.box, extent)
                if box.volume:
                    yield part, box, _moved(extent.local, box.start, extent.start)

    def _sound(self, part: _Part, box: boxes.Box) -> _Copy:
        """First copy of a part of which a box matches its hashes.

        Raises:
            DataError: None does.
        """
        bad: list[DataError] = []
        for slot, item, extent in part.copies:
            try:
                slot.check(item, (_inside(extent, box), box.shape), self._stack)
            except DataError as error:
                bad.append(error)
            else:
                self.flaws += [error.message for error in bad if error.message not in self.flaws]
                return slot, item, extent
        raise bad[0]


class _Slot:
    """A shard's slot: mapped once it is needed, checked block by block."""

    def __init__(self, job_dir: str, manifest: ShardManifest) -> None:
        self.job_dir, self.manifest = job_dir, manifest
        self.read_bytes = 0
        self._view: memoryview | None = None  # of the mapping
        self._broken: DataError | None = None
        self._good: set[tuple[str, int]] = set()
        self._bad: dict[tuple[str, int], DataError] = {}

    def check(self, item: Item, box: tuple[tuple[int, ...], tuple[int, ...]], stack: contextlib.ExitStack) -> None:
        """Compare the blocks of an item that a box lies in; each is read once.

        Raises:
            DataError: One does not match, or the slot is not what its manifest says.
        """
        view = self._open(stack)
        for index in _blocks(item, box):
            key = (item.name, index)
            if key in self._bad:
                raise self._bad[key]
            if key in self._good:
                continue
            assert item.offset is not None
            start, stop = blocks.block_range(item, index)
            self.read_bytes += stop - start
            if digest(view[item.offset + start : item.offset + stop]) != blocks.block_hash(item, index):
                self._bad[key] = DataError(
                    f"{self._path}: {blocks.words(item, index)} do not match their hash",
                    fault="flipped",
                    iteration=self.manifest.iteration,
                    rank=self.manifest.rank,
                )
                raise self._bad[key]
            self._good.add(key)

    def check_again(self) -> None:
        """Compare the stamp again, if the slot was read."""
        if self._view is not None:
            stamps.check(self._view, self.manifest, self._path)

    def array(self, item: Item, unit: int) -> Array:
        """The bytes of an item that was checked, as an array with a last dimension of one element's bytes."""
        assert item.offset is not None
        return np.ndarray((*item.shape, unit), np.uint8, self._view, item.offset)

    def forget(self) -> None:
        """Let go of the mapping."""
        self._view = None

    @property
    def _path(self) -> str:
        return seal.slot_path(self.job_dir, self.manifest)

    def _open(self, stack: contextlib.ExitStack) -> memoryview:
        if self._broken is not None:
            raise self._broken
        if self._view is None:
            try:
                data, _ = stack.enter_context(seal.mapped(self.job_dir, self.manifest))
            except DataError as error:
                self._broken = error
                raise
            self._view = memoryview(data)
        return self._view


_Copy = tuple[_Slot, Item, Extent]


@dataclass
class _Part:
    """A box of a tensor, and the shards' items that hold it."""

    box: boxes.Box
    copies: list[_Copy]


@dataclass
class _Held:
    """A tensor, as the shards hold it."""

    dtype: str
    shape: tuple[int, ...]
    private: bool
    parts: list[_Part] = field(default_factory=list)


def _hold(name: str, having: Sequence[tuple[_Slot, Item]], rank: int | None) -> _Held | None:
    """Find out where the parts of an item are; None if it is private to other ranks.

    Raises:
        DataError: The shards' items of this name do not fit together.
    """
    _, first = having[0]
    for slot, item in having:
        for kind in ("sharing", *(("dtype", "global_shape") if first.sharing == "sharded" else ())):
            here, there = getattr(first, kind), getattr(item, kind)
            if here != there:
                a, b = having[0][0].manifest.where, slot.manifest.where
                raise DataError(f"{name}: {kind} is {here} for {a} but {there} for {b}", fault="torn", item=name)
        if item.nbytes != layout.nbytes(item.dtype, item.shape) or (item.offset is None and item.nbytes):
            text = f"{item.nbytes} bytes at {item.offset} for shape {list(item.shape)} of {item.dtype}"
            raise DataError(f"{name}: {text} on {slot.manifest.where}", fault="torn", item=name)
    if first.sharing == "sharded":
        return _hold_sharded(name, having)
    alike = {(item.dtype, item.shape, item.nbytes, item.xxh3) for _, item in having}
    private = first.sharing == "private" or len(alike) > 1
    mine = [(slot, item) for slot, item in having if not private or slot.manifest.rank == rank]
    if not mine:
        return None
    item, zero = mine[0][1], (0,) * len(mine[0][1].shape)
    extent = Extent(local=zero, start=zero, shape=item.shape)
    held = _Held(item.dtype, item.shape, private)
    if item.nbytes:
        held.parts.append(_Part(boxes.Box(zero, item.shape), [(slot, item, extent) for slot, item in mine]))
    return held


def _hold_sharded(name: str, having: Sequence[tuple[_Slot, Item]]) -> _Held:
    _, first = having[0]
    parts: dict[boxes.Box, _Part] = {}
    alike: dict[tuple[object, ...], tuple[_Slot, Item]] = {}
    for slot, item in having:
        other, same = alike.setdefault((item.shape, item.extents), (slot, item))
        if (same.xxh3, same.block_bytes) != (item.xxh3, item.block_bytes):
            text = (
                f"{name}: {other.manifest.where} and {slot.manifest.where} hold the same part with different contents"
            )
            mend = "replicas of a sharded tensor must be equal: look for a node that computes wrong"
            raise DataError(text, mend=mend, fault="torn", item=name)
        for extent in item.extents:
            if 0 in extent.shape:
                continue
            if not boxes.inside(boxes.Box(extent.local, extent.shape), item.shape):
                text = f"an extent of {slot.manifest.where} is outside of its tensor {list(item.shape)}"
                raise DataError(f"{name}: {text}", fault="torn", item=name)
            box = boxes.Box(extent.start, extent.shape)
            parts.setdefault(box, _Part(box, [])).copies.append((slot, item, extent))
    if math.prod(first.global_shape):
        fault = boxes.flaw(first.global_shape, tuple(parts)) if parts else "all of it is missing"
        if fault:
            ranks = world.words(sorted({slot.manifest.rank for slot, item in having if item.nbytes}))
            text = f"{name} {list(first.global_shape)}: {fault} in the shards of {ranks}"
            raise DataError(text, fault="torn", item=name)
    return _Held(first.dtype, first.global_shape, private=False, parts=list(parts.values()))


def _common(box: boxes.Box, extent: Extent) -> boxes.Box:
    """What two boxes of a tensor have in common."""
    start = tuple(map(max, box.start, extent.start))
    stops = zip(box.start, box.shape, extent.start, extent.shape, start, strict=True)
    return boxes.Box(start, tuple(max(0, min(a + n, b + m) - at) for a, n, b, m, at in stops))


def _moved(at: Sequence[int], by: Sequence[int], less: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b - c for a, b, c in zip(at, by, less, strict=True))


def _inside(extent: Extent, box: boxes.Box) -> tuple[int, ...]:
    """Where a box of the whole begins in the item that an extent is of."""
    return _moved(extent.local, box.start, extent.start)


def _slices(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))


def _blocks(item: Item, box: tuple[tuple[int, ...], tuple[int, ...]]) -> Iterator[int]:
    """Blocks of an item that a box of it lies in, some more than once."""
    if not item.block_bytes:
        yield 0
        return
    strides = [step * layout.itemsize(item.dtype) for step in boxes.strides(item.shape)]
    whole: Box = (box[0], box[0], box[1])
    for _, start, shape in cut(whole, item.shape, strides):
        first = sum(at * step for at, step in zip(start, strides, strict=True))
        last = first + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        last += layout.itemsize(item.dtype) - 1
        yield from range(first // item.block_bytes, last // item.block_bytes + 1)
