"""Where bytes come from at a restore: a slot of the burst buffer, or a drained file. Both verify before they give."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch

from slurm_resil.ckpt import dtypes, seal
from slurm_resil.ckpt.state import Array
from slurm_resil.ckpt.verified import VerifiedFile
from slurm_resil.core.background import Background, share
from slurm_resil.core.errors import DataError, StateError
from slurm_resil.format import contents, layout
from slurm_resil.format import stamp as stamps
from slurm_resil.format.manifest import DrainedItem, DrainedManifest, Extent, Item, ShardManifest
from slurm_resil.format.ranges import Range, ranges
from slurm_resil.format.staged import StagedCopy

_COPY_BYTES = 16 << 20  # copied by one of several threads before it looks for more


class Want(NamedTuple):  # quicker to make than a dataclass: there are as many as tensors
    """What is needed of one item.

    Attributes:
        name: The item.
        dtype: Type that the place in the state has.
        local_shape: Shape of the place.
        global_shape: Shape of the whole tensor.
        extents: Which boxes of the whole are wanted, and where they go; empty with ``whole`` for all of it.
        where: Path in the state, for a person.
    """

    name: str
    dtype: str
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    extents: tuple[Extent, ...]
    whole: bool
    where: str


class Source(Protocol):
    """A checkpoint to restore from."""

    def misfit(self, want: Want) -> str:
        """Say why an item cannot go where it is wanted; empty if it can. Reads no data."""

    def verify(self, wants: Sequence[Want]) -> None:
        """Read everything that is wanted and compare it with its hashes.

        Raises:
            DataError: Something is not what it claims to be.
        """

    def fill(self, want: Want, target: torch.Tensor | Array) -> None:
        """Copy verified bytes into a tensor or array of the wanted type and local shape, in place.

        Raises:
            DataError: The bytes changed since they were verified.
        """

    def fill_all(self, places: Sequence[tuple[Want, torch.Tensor | Array]]) -> None:
        """Fill many.

        Raises:
            DataError: See :meth:`fill`.
        """
        for want, target in places:
            self.fill(want, target)


def copy_in(target: torch.Tensor | Array, data: Array) -> None:
    """Copy raw bytes (uint8, 1-d, contiguous) into a target of any strides and device."""
    if isinstance(target, np.ndarray):
        np.copyto(target, data.view(target.dtype).reshape(target.shape), casting="no")
        return
    with torch.no_grad():
        target.copy_(torch.from_numpy(data).view(target.dtype).reshape(target.shape))


def memory_of(target: torch.Tensor | Array) -> Array | None:
    """Memory of a target as a flat array of bytes, to be written to; None if that is not in order or not in reach."""
    if isinstance(target, np.ndarray):
        return target.reshape(-1).view(np.uint8) if target.flags.c_contiguous else None
    if not target.is_cpu or not target.is_contiguous() or target.is_conj() or target.is_neg():
        return None
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)  # as torch itself does, for whoever watches the tensor
    flat: Array = dtypes.as_bytes(target).numpy()
    return flat


class LocalSource(Source):
    """A sealed shard in a slot of this node. Use as a context manager.

    Args:
        job_dir: Job's directory in the burst buffer.
        manifest: Of the shard.
        helpers: Threads that verify beside the caller, and unmap.

    Attributes:
        read_bytes: Bytes of the items that were given.
    """

    def __init__(self, job_dir: str, manifest: ShardManifest, helpers: Sequence[Background] = ()) -> None:
        self._manifest = manifest
        self._items: dict[str, Item] = {item.name: item for item in manifest.items}
        self._where = seal.slot_path(job_dir, manifest)
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self._stack = contextlib.ExitStack()
        self._helpers = helpers
        later = {"unmap": helpers[0].put} if helpers else {}
        self._map, _ = self._stack.enter_context(seal.mapped(job_dir, manifest, **later))
        self.read_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._views.clear()
        self._stack.close()

    def misfit(self, want: Want) -> str:
        """See Source."""
        item = self._items.get(want.name)
        if item is None:
            raise DataError(f"{self._where}: the manifest's values name {want.name}, its items do not", fault="torn")
        if item.dtype != want.dtype:
            return f"{want.where}: {item.dtype} in the checkpoint, {want.dtype} in the state"
        if item.global_shape != want.global_shape:
            return f"{want.where}: shape {item.global_shape} in the checkpoint, {want.global_shape} in the state"
        same = item.extents == want.extents if item.sharing == "sharded" else want.whole
        if item.shape != want.local_shape or not (same or _covers(item.extents, item.shape, want)):
            return f"{want.where}: another part of the tensor is in the checkpoint than in the state"
        return ""

    def verify(self, wants: Sequence[Want]) -> None:
        """See Source."""
        items = [self._items[name] for name in dict.fromkeys(want.name for want in wants)]
        contents.check_items(self._map, self._manifest, items, self._where, self._helpers)

    def fill(self, want: Want, target: torch.Tensor | Array) -> None:
        """See Source."""
        self.fill_all([(want, target)])

    def fill_all(self, places: Sequence[tuple[Want, torch.Tensor | Array]]) -> None:
        """See Source."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for want, target in places:
                item = self._items[want.name]
                if item.offset is None:
                    continue
                self.read_bytes += item.nbytes
                if isinstance(target, np.ndarray):
                    copy_in(target, np.frombuffer(self._map, np.uint8, item.nbytes, item.offset))
                    continue
                source = self._view(target, item.offset)
                if target.is_cpu and not (target.is_neg() or target.is_conj()):
                    pairs.append((target, source))
                else:
                    target.copy_(source)
        share(_copy, _portions(pairs) if self._helpers else [pairs] if pairs else [], self._helpers)

    def _view(self, target: torch.Tensor, offset: int) -> torch.Tensor:
        """Look at the mapping as a tensor of a target's type and shape."""
        dtype = target.dtype
        at, odd = divmod(offset, dtype.itemsize)
        if odd or not target.is_contiguous():
            return torch.frombuffer(self._map, dtype=dtype, count=target.numel(), offset=offset).view(target.shape)
        whole = self._views.get(dtype)  # to look at a part of it takes a third of the time
        if whole is None:
            count = len(self._map) // dtype.itemsize
            whole = self._views[dtype] = torch.frombuffer(self._map, dtype=dtype, count=count)
        return whole.as_strided(target.shape, target.stride(), at)

    def check_again(self) -> None:
        """Check that the slot was not written meanwhile.

        Raises:
            DataError: It was.
        """
        stamps.check(self._map, self._manifest, self._where)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy in one call, during which other threads may run."""
    with torch.no_grad():  # which is a thread's own
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _portions(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Cut copies into portions that several threads do; a large tensor goes in parts."""
    portion: list[tuple[torch.Tensor, torch.Tensor]] = []
    size = 0
    for target, source in pairs:
        if target.nbytes > 2 * _COPY_BYTES and target.is_contiguous() and source.is_contiguous():
            count = _COPY_BYTES // target.itemsize
            to, from_ = target.view(-1), source.view(-1)
            yield from ([(to[at : at + count], from_[at : at + count])] for at in range(0, len(to), count))
            continue
        portion.append((target, source))
        size += target.nbytes
        if size >= _COPY_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _covers(extents: Sequence[Extent], shape: tuple[int, ...], want: Want) -> bool:
    """Whether two descriptions mean the same part: one box that is the whole tensor equals ``whole``."""
    zero = (0,) * len(shape)
    all_of_it = (Extent(local=zero, start=zero, shape=shape),)
    mine = tuple(extents) or all_of_it
    theirs = want.extents or (all_of_it if want.whole else ())
    return shape == want.global_shape and mine == theirs


class DrainedSource(Source):
    """A drained file, read by the blocks that are needed. Use as a context manager.

    Args:
        run_dir: Run's directory on the parallel file system.
        manifest: What it holds.
        rank: Whose private items are wanted: a rank of the old world, or None where they are out of reach.
        staged: Copy of blocks of it on this node, see :class:`slurm_resil.ckpt.verified.VerifiedFile`.

    Attributes:
        wanted_bytes: Bytes that were asked for.
    """

    def __init__(
        self, run_dir: str, manifest: DrainedManifest, rank: int | None, staged: StagedCopy | None = None
    ) -> None:
        self._rank = rank
        self._path = os.path.join(run_dir, os.path.basename(manifest.file))
        self._global = {item.name: item for item in manifest.items if item.rank is None}
        self._private: dict[tuple[int | None, str], DrainedItem] = {
            (item.rank, item.name): item for item in manifest.items if item.rank is not None
        }
        self._file = VerifiedFile(self._path, manifest, staged)
        self.wanted_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def read_bytes(self) -> int:
        """Bytes that were read from the file, in blocks."""
        return self._file.read_bytes

    @property
    def staged_bytes(self) -> int:
        """How many of them came from the staged copy."""
        return self._file.staged_bytes

    def is_global(self, name: str) -> bool:
        """Whether an item is one for all ranks."""
        return name in self._global

    def values(self, rank: int) -> bytes:
        """Read the plain values of a rank of the old world, verified.

        Raises:
            DataError: There are none, or they do not match their hash.
        """
        item = self._private.get((rank, layout.VALUES))
        if item is None or item.offset is None:
            raise DataError(f"{self._path} has no values of rank {rank}", fault="torn")
        return self._file.view(item.offset, item.nbytes).tobytes()

    def _find(self, name: str) -> DrainedItem | None:
        return self._global.get(name) or self._private.get((self._rank, name))

    def misfit(self, want: Want) -> str:
        """See Source."""
        item = self._find(want.name)
        if item is None:
            raise DataError(f"{self._path}: the values name {want.name}, the items do not", fault="torn")
        if item.dtype != want.dtype:
            return f"{want.where}: {item.dtype} in the checkpoint, {want.dtype} in the state"
        if item.shape != want.global_shape:
            return f"{want.where}: shape {item.shape} in the checkpoint, {want.global_shape} in the state"
        return ""

    def verify(self, wants: Sequence[Want]) -> None:
        """See Source."""
        needed: set[int] = set()
        for want in wants:
            item = self._find(want.name)
            if item is None or item.offset is None:
                continue
            if want.whole:
                needed.update(self._file.blocks_of(item.offset, item.nbytes))
            else:
                for piece in self._pieces(item, want):
                    needed.update(self._file.blocks_of(item.offset + piece.start, piece.nbytes))
        for index in sorted(needed):
            self._file.block(index)

    def fill(self, want: Want, target: torch.Tensor | Array) -> None:
        """See Source."""
        item = self._find(want.name)
        size = layout.nbytes(want.dtype, want.local_shape)
        if item is None or item.offset is None or size == 0:
            return
        self.wanted_bytes += size
        memory = memory_of(target)
        if want.whole and memory is not None:
            self._file.read_into(item.offset, memory)
            return
        unit = layout.itemsize(want.dtype)
        local = np.empty(size, np.uint8) if memory is None else memory
        local = local.reshape(*want.local_shape, unit)
        for at, start, count, box, strides in self._pieces(item, want):
            place = local[tuple(slice(first, first + extent) for first, extent in zip(at, box, strict=True))]
            if count == place.nbytes and place.flags.c_contiguous:
                self._file.read_into(item.offset + start, place.reshape(-1))
                continue
            data = self._file.view(item.offset + start, count)
            place[...] = np.lib.stride_tricks.as_strided(data, (*box, unit), (*strides, 1), writeable=False)
        if memory is None:
            copy_in(target, local.reshape(-1))

    def fill_all(self, places: Sequence[tuple[Want, torch.Tensor | Array]]) -> None:
        """See Source."""

        def offset(place: tuple[Want, torch.Tensor | Array]) -> int:
            item = self._find(place[0].name)
            return 0 if item is None or item.offset is None else item.offset

        for want, target in sorted(places, key=offset):  # or blocks would be read again and again
            self.fill(want, target)

    @staticmethod
    def _pieces(item: DrainedItem, want: Want) -> Iterator[Range]:
        """Cut what is wanted into ranges of the item's bytes."""
        return ranges(item.shape, layout.itemsize(item.dtype), None if want.whole else want.extents)


def fresh(dtype: str, shape: Sequence[int], where: str, fields: object = None) -> torch.Tensor | Array:
    """Make an empty tensor or array in host memory.

    Raises:
        StateError: This torch does not have the type.
    """
    if dtype.startswith("torch."):
        return torch.empty(tuple(shape), dtype=dtypes.torch_dtype(dtype, where))
    if dtype == "bytes":
        return np.empty(tuple(shape), np.uint8)
    if dtype.startswith("numpy."):
        return np.empty(tuple(shape), dtypes.numpy_dtype(dtype, fields))
    raise StateError(f"{where}: {dtype!r} is no type of a tensor")
