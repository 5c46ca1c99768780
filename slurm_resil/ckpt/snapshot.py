"""Copy a state into a slot: a preallocated, prefaulted, mapped HDF5 file in the burst buffer."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slurm_resil.ckpt import dtypes
from slurm_resil.ckpt.device import Lanes, Registered
from slurm_resil.ckpt.flat import Flat, FlatItem
from slurm_resil.ckpt.state import Array
from slurm_resil.core import paths
from slurm_resil.core.errors import ConfigError, DataError, SpaceError, missing_path
from slurm_resil.core.model import RunInfo
from slurm_resil.format import container, draft, layout
from slurm_resil.format import stamp as stamps
from slurm_resil.format.manifest import Item, ShardManifest

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_LEAST_SLOTS = 2  # one holds the newest that is sealed, one is written
_STRUCTURE_BYTES = 1024  # more than HDF5 needs to describe one dataset, names included


@dataclass
class _Slot:
    """A slot that is laid out and mapped."""

    flat_items: tuple[FlatItem, ...]
    items: tuple[Item, ...]
    map: mmap.mmap
    targets: list[torch.Tensor | Array | None]  # views of the map, one for each item; None for empty ones
    segments: tuple[Any, ...] | None = None  # that its description has
    description: str = ""  # its hash


class Arena:
    """Slots of one rank.

    A slot is laid out when a state of another shape is written into it than before; otherwise its pages are used again,
    and a write is a copy. The caller says which slot is free (the agent leases them).

    Args:
        job_dir: Job's directory in the burst buffer; created if only the last part is missing.
        rank: Global rank.
        slots: Number of slots.
        lanes: How tensors are copied; only tests give another.
    """

    def __init__(self, job_dir: str, rank: int, slots: int = 3, *, lanes: Lanes | None = None) -> None:
        self._job_dir, self._rank, self._count = job_dir, rank, slots
        self._slots: dict[int, _Slot] = {}
        self._lanes = lanes or Lanes()
        self._registered = Registered()
        self._generation = 0
        self._written: dict[int, int] = {}  # iteration -> slot

    def write(self, index: int, flat: Flat, *, iteration: int, run: RunInfo, node: str) -> ShardManifest:
        """Copy a state into a slot. When it returns, every tensor of the state may be overwritten.

        Args:
            index: A slot that holds nothing of worth.
            flat: The state.
            iteration: Number of complete iterations.
            run: The run.
            node: Name of this node.

        Returns:
            Manifest without hashes, for the seal.

        Raises:
            SpaceError: The burst buffer is full, too small or read-only; names path and both sizes.
            ConfigError: There is no burst buffer.
            OSError: The file system refused otherwise.
        """
        if not 0 <= index < self._count:
            raise IndexError(f"slot {index} of {self._count}")
        started = time.perf_counter()
        self._forget(index)
        slot = self._laid_out(index, flat)
        laid_out = time.perf_counter()
        self._generation = max(time.time_ns(), self._generation + 1)
        stamp = stamps.make(run, generation=self._generation, iteration=iteration, rank=self._rank)
        stamps.begin(slot.map, stamp)
        self._copy(slot, flat)
        stamps.end(slot.map, stamp)
        self._written = {at: other for at, other in self._written.items() if other != index} | {iteration: index}
        costs = {"copy": time.perf_counter() - laid_out, "layout": laid_out - started}
        return ShardManifest(
            run_id=run.run_id,
            job_id=run.job_id,
            attempt=run.attempt,
            iteration=iteration,
            rank=self._rank,
            world_size=run.world_size,
            node=node,
            slot=os.path.basename(paths.slot(self._job_dir, self._rank, index)),
            generation=stamp.generation,
            items=slot.items,
            values=flat.values,
            created_s=time.time(),
            costs_s=costs,
        )

    def draft(self, manifest: ShardManifest, flat: Flat) -> str:
        """What the agent needs to seal a slot that was just written, see :mod:`slurm_resil.format.draft`.

        Raises:
            OSError: The file system refused.
        """
        index = self._written[manifest.iteration]
        slot = self._slots[index]
        if slot.segments is not flat.segments:
            slot.description = draft.describe(self._job_dir, manifest.slot, slot.items, flat.segments)
            slot.segments = flat.segments
        return draft.send(self._job_dir, manifest, slot.description, flat.segments)

    def prepare(self, flat: Flat, indices: tuple[int, ...] | None = None) -> None:
        """Lay slots out before they are needed, so that the first saves are as fast as the later ones.

        Args:
            flat: A state of the shape that will be written.
            indices: Slots that hold nothing of worth; default: all.

        Raises:
            SpaceError: See :meth:`write`.
        """
        for index in range(self._count) if indices is None else indices:
            self._forget(index)
            self._laid_out(index, flat)

    def close(self) -> None:
        """Unmap the slots; the files stay."""
        for index in list(self._slots):
            self._unmap(index)

    def _copy(self, slot: _Slot, flat: Flat) -> None:
        to_host: list[torch.Tensor] = []
        from_host: list[torch.Tensor] = []
        with torch.no_grad():
            try:
                for source, target in zip(flat.sources, slot.targets, strict=True):
                    if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
                        if source.is_cpu and self._lanes.batches:
                            to_host.append(target)
                            from_host.append(source)
                            continue
                        if source.is_cuda:
                            self._registered.add(slot.map)
                        self._lanes.copy(target, source)
                    elif isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
                        np.copyto(target, source, casting="no")
                self._lanes.copy_all(to_host, from_host)  # while the devices copy
            finally:
                self._lanes.finish()

    def _forget(self, index: int) -> None:
        """Remove the manifest of what the slot holds: presence means valid, and that ends here."""
        path = paths.slot(self._job_dir, self._rank, index)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, DataError):
            with open(path, "rb") as file:
                stamp = stamps.read(file.read(stamps.BYTES), where=path)
            manifest = paths.manifest(self._job_dir, stamp.iteration, self._rank)
            # nobody else writes this rank's slots, and to read the manifest of a large state takes a while
            mine = self._written.get(stamp.iteration) == index
            if mine or ShardManifest.load(manifest).slot == os.path.basename(path):
                os.unlink(manifest)

    def _laid_out(self, index: int, flat: Flat) -> _Slot:
        slot = self._slots.get(index)
        path = paths.slot(self._job_dir, self._rank, index)
        if slot is not None and self._fits(index, flat) and os.path.exists(path):
            return slot
        self._unmap(index)
        with self._refusals(flat):
            self._make_directory()
            self._check_space(index, flat)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            temp = f"{path}.tmp"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temp)
            try:
                slot = self._create(temp, flat)
                os.replace(temp, path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temp)
                raise
        self._slots[index] = slot
        return slot

    def _create(self, path: str, flat: Flat) -> _Slot:
        skeleton = container.create_skeleton(
            path,
            [_spec(item) for item in flat.items],
            attributes={"format": "slurm_resil slot", "version": 1, "rank": self._rank},
            user_block_bytes=container.USER_BLOCK_BYTES,
        )
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # every byte has its place now: later the copy cannot run out of space, which would be a SIGBUS
            os.posix_fallocate(fd, 0, skeleton.file_bytes)
            map_ = mmap.mmap(fd, skeleton.file_bytes)
        finally:
            os.close(fd)
        _prefault(map_)
        rows = zip(flat.items, flat.sources, skeleton.offsets, strict=True)
        targets = [_target(map_, item, source, at) for item, source, at in rows]
        items = tuple(_items(flat, skeleton.offsets))
        return _Slot(flat_items=flat.items, items=items, map=map_, targets=targets)

    def _unmap(self, index: int) -> None:
        slot = self._slots.pop(index, None)
        if slot is not None:
            slot.targets.clear()
            self._registered.remove(slot.map)
            slot.map.close()

    def _make_directory(self) -> None:
        root = os.path.dirname(self._job_dir.rstrip("/")) or "."
        if not os.path.isdir(root):
            raise missing_path(root, "the burst buffer", "create it on every node, or set SLURM_RESIL_BB_ROOT")
        for name in ("slots", "described"):
            os.makedirs(os.path.join(self._job_dir, name), mode=0o700, exist_ok=True)

    def _check_space(self, index: int, flat: Flat) -> None:
        """Refuse early when this slot does not fit, or fewer slots than it takes to save again and again.

        More than those are a help for drains that are slow, and not worth refusing for.
        """
        size, others = _estimate(flat), [one for one in range(self._count) if one != index]
        made = sum(one != index and self._fits(one, flat) for one in self._slots)
        missing = min(_LEAST_SLOTS, self._count) - made - 1
        info = os.statvfs(self._job_dir)
        if not info.f_blocks:
            return
        free = info.f_bavail * info.f_frsize + self._held(index)
        if free < size:
            raise self._too_small(free, size, flat, made)
        # what others of an earlier layout hold comes back when it is their turn
        free += sum(self._held(one) for one in others if not self._fits(one, flat))
        if free < size * (1 + max(missing, 0)):
            raise self._too_small(free, size * (1 + missing), flat, made)

    def _fits(self, index: int, flat: Flat) -> bool:
        """Whether a slot is laid out for a state."""
        slot = self._slots.get(index)
        return slot is not None and slot.flat_items == flat.items

    def _held(self, index: int) -> int:
        """Bytes of a slot's file."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(paths.slot(self._job_dir, self._rank, index)).st_blocks * 512
        return 0

    def _too_small(self, free: int, wanted: int, flat: Flat, made: int) -> SpaceError:
        what, goes_on = f"for a slot with a state of {flat.nbytes} bytes", ""
        if made >= _LEAST_SLOTS:
            goes_on = f"; the next saves use the {made} slots that are there"
        elif wanted > _estimate(flat):
            what = f"for {_LEAST_SLOTS} slots with a state of {flat.nbytes} bytes"
        return SpaceError(
            f"the burst buffer at {self._job_dir} has {free} bytes for rank {self._rank}, {wanted} are needed {what}",
            mend=f"free space there, or use a larger burst buffer (SLURM_RESIL_BB_ROOT){goes_on}",
            path=self._job_dir,
        )

    @contextlib.contextmanager
    def _refusals(self, flat: Flat) -> Iterator[None]:
        """Turn what a full or read-only file system says into one kind of error."""
        try:
            yield
        except SpaceError:
            raise
        except OSError as error:
            if error.errno not in _FULL:
                if isinstance(error, NotADirectoryError | PermissionError):
                    raise ConfigError(f"the burst buffer at {self._job_dir} cannot be used: {error}") from error
                raise
            if error.errno == errno.EROFS:
                raise SpaceError(f"the burst buffer at {self._job_dir} is read-only", path=self._job_dir) from error
            info = os.statvfs(os.path.dirname(self._job_dir.rstrip("/")) or ".")
            made = len(self._slots)  # without the one that is laid out now
            raise self._too_small(info.f_bavail * info.f_frsize, _estimate(flat), flat, made) from error


def _estimate(flat: Flat) -> int:
    """Upper bound of a slot's size, bytes."""
    align = layout.ALIGNMENT_BYTES
    data = sum(-(-item.nbytes // align) * align for item in flat.items)
    names = sum(len(item.name.encode()) for item in flat.items)
    return data + container.USER_BLOCK_BYTES + _STRUCTURE_BYTES * (len(flat.items) + 8) + names


def _spec(item: FlatItem) -> container.Spec:
    # what differs between saves is in the manifest; a slot says for itself what its bytes are
    attributes: dict[str, object] = {}
    if item.sharing == "sharded":
        attributes = {"global_shape": item.global_shape, "extents": [[*vars(e).values()] for e in item.extents[:64]]}
    return container.Spec(
        path=layout.dataset_path(item.name), dtype=item.dtype, shape=item.shape, attributes=attributes
    )


def _items(flat: Flat, offsets: tuple[int | None, ...]) -> Iterator[Item]:
    for item, offset in zip(flat.items, offsets, strict=True):
        yield Item(
            name=item.name,
            dtype=item.dtype,
            shape=item.shape,
            offset=offset,
            nbytes=item.nbytes,
            sharing=item.sharing,
            global_shape=item.global_shape,
            extents=item.extents,
        )


def _target(
    map_: mmap.mmap, item: FlatItem, source: torch.Tensor | Array, offset: int | None
) -> torch.Tensor | Array | None:
    if offset is None:
        return None
    count = item.nbytes // layout.itemsize(item.dtype)
    if isinstance(source, np.ndarray):
        flat = np.frombuffer(map_, np.uint8, item.nbytes, offset)
        return flat.view(source.dtype).reshape(item.shape)
    dtype = dtypes.torch_dtype(item.dtype, item.name)
    return torch.frombuffer(map_, dtype=dtype, count=count, offset=offset).reshape(item.shape)


def _prefault(map_: mmap.mmap) -> None:
    """Touch every page for writing, so that the copies do not wait for the kernel to find them."""
    try:
        map_.madvise(_POPULATE_WRITE)
    except OSError:
        for at in range(0, len(map_), mmap.PAGESIZE):  # an older kernel
            map_[at] = map_[at]
