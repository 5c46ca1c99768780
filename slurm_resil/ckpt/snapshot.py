"""Copy a state into a slot: a preallocated, prefaulted, mapped HDF5 file in the burst buffer."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slurm_resil.ckpt import dtypes
from slurm_resil.ckpt.copying import Copies
from slurm_resil.ckpt.device import Lanes, Registered
from slurm_resil.ckpt.flat import Flat, FlatItem
from slurm_resil.ckpt.slotfile import SlotFiles, Wanted
from slurm_resil.ckpt.state import Array
from slurm_resil.core import paths
from slurm_resil.core.errors import DataError
from slurm_resil.core.model import RunInfo
from slurm_resil.format import container, draft, layout
from slurm_resil.format import stamp as stamps
from slurm_resil.format.manifest import Item, ShardManifest


@dataclass
class _Slot:
    """A slot that is laid out and mapped."""

    wanted: Wanted
    flat_items: tuple[FlatItem, ...]
    items: tuple[Item, ...]
    offsets: tuple[int | None, ...]
    map: mmap.mmap
    file: tuple[int, int] | None  # device and inode
    targets: list[torch.Tensor | Array | None]  # views of the map, one for each item; None for empty ones
    segments: tuple[Any, ...] | None = None  # that its description has
    description: str = ""  # its hash


class Writing:
    """A shard of which a part may still have to be copied, see :meth:`Arena.start`.

    Attributes:
        copies: What is still to be copied.
    """

    def __init__(self, slot: _Slot, stamp: stamps.Stamp, copies: Copies, make: Callable[[], ShardManifest]) -> None:
        self.copies = copies
        self._slot, self._stamp, self._make = slot, stamp, make

    def finish(self) -> ShardManifest:
        """Copy what is left, and say in the slot that it is complete.

        Raises:
            StateError: A tensor was changed before it was copied; the slot stays torn.
        """
        self.copies.finish()
        stamps.end(self._slot.map, self._stamp)
        return self._make()


class Arena:
    """Slots of one rank.

    A slot is laid out when a state of another shape is written into it than before; otherwise its pages are used again,
    and a write is a copy. The caller says which slot is free (the agent leases them).

    Args:
        job_dir: Job's directory in the burst buffer; created if only the last part is missing.
        rank: Global rank.
        slots: Number of slots.
        reserve: Bytes that parities may take on this node, of the bytes of the state of a rank; default: none.
        lanes: How tensors are copied; only tests give another.
    """

    def __init__(
        self,
        job_dir: str,
        rank: int,
        slots: int = 3,
        *,
        reserve: Callable[[int], int] = lambda _: 0,
        lanes: Lanes | None = None,
    ) -> None:
        self._job_dir, self._rank, self._count = job_dir, rank, slots
        self._files = SlotFiles(job_dir, rank, slots)
        self._slots: dict[int, _Slot] = {}
        self._reserve, self._lanes = reserve, lanes or Lanes()
        self._registered = Registered(self._lanes.runtime)
        self._generation = 0
        self._written: dict[int, int] = {}  # iteration -> slot
        self._wanted: tuple[tuple[FlatItem, ...], Wanted] | None = None  # of the newest state

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
        return self.start(index, flat, iteration=iteration, run=run, node=node).finish()

    def start(
        self,
        index: int,
        flat: Flat,
        *,
        iteration: int,
        run: RunInfo,
        node: str,
        later: Callable[[object], bool] | None = None,
    ) -> Writing:
        """Begin to copy a state into a slot, see :meth:`write`.

        Args:
            index: See :meth:`write`.
            flat: See :meth:`write`.
            iteration: See :meth:`write`.
            run: See :meth:`write`.
            node: See :meth:`write`.
            later: Whether a tensor of the state stays as it is until the rest is copied; default: nothing does.

        Returns:
            What is left to do. Everything but what ``later`` accepts is copied, or on its way in front of whatever the
            caller gives its devices to do from now on.

        Raises:
            SpaceError: See :meth:`write`.
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
        copies = Copies(self._lanes)
        for item, source, origin, target in zip(flat.items, flat.sources, flat.origins, slot.targets, strict=True):
            if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
                if self._lanes.on_device(source):
                    self._registered.add(slot.map)
                copies.tensor(item.name, target, source, later=later is not None and later(origin))
            elif isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
                np.copyto(target, source, casting="no")
        copies.start()
        self._written = {at: other for at, other in self._written.items() if other != index} | {iteration: index}
        blocked = time.perf_counter()

        def manifest() -> ShardManifest:
            now = time.perf_counter()
            costs = {"copy": now - laid_out, "layout": laid_out - started}
            if later is not None:
                costs["blocked"] = blocked - laid_out
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

        return Writing(slot, stamp, copies, manifest)

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

    def wanted(self, flat: Flat) -> Wanted:
        """Layout that a state needs."""
        if self._wanted is None or self._wanted[0] is not flat.items:
            specs = tuple(map(slot_spec, flat.items))
            reserve_bytes = self._reserve(Wanted(rank=self._rank, specs=specs).file_bytes)
            self._wanted = (flat.items, Wanted(rank=self._rank, specs=specs, reserve_bytes=reserve_bytes))
        return self._wanted[1]

    def prepare(self, flat: Flat, indices: tuple[int, ...] | None = None) -> None:
        """Lay slots out and map them before they are needed, so that the first saves are as fast as the later ones.

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
        wanted, slot = self.wanted(flat), self._slots.get(index)
        if slot is not None and slot.wanted.digest == wanted.digest and slot.file == _file(self._files.path(index)):
            if slot.flat_items != flat.items:  # what only the manifest has
                slot.flat_items, slot.items, slot.segments = flat.items, tuple(slot_items(flat, slot.offsets)), None
            return slot
        self._unmap(index)
        laid, map_ = self._files.open(index, wanted)
        key = (flat.items, laid.offsets)
        same = next((one for one in self._slots.values() if (one.flat_items, one.offsets) == key), None)
        offsets, items = (same.offsets, same.items) if same is not None else (laid.offsets, None)
        rows = zip(flat.items, flat.sources, offsets, strict=True)
        slot = self._slots[index] = _Slot(
            wanted=wanted,
            flat_items=flat.items,
            items=tuple(slot_items(flat, offsets)) if items is None else items,  # of many tensors: not once per slot
            offsets=offsets,
            map=map_,
            file=_file(self._files.path(index)),
            targets=[_target(map_, item, source, at) for item, source, at in rows],
        )
        return slot

    def _unmap(self, index: int) -> None:
        slot = self._slots.pop(index, None)
        if slot is not None:
            slot.targets.clear()
            self._registered.remove(slot.map)
            slot.map.close()


def _file(path: str) -> tuple[int, int] | None:
    """Device and inode; None if there is no such file."""
    try:
        info = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


def slot_spec(item: FlatItem) -> container.Spec:
    """Dataset of an item in a slot."""
    # what differs between saves is in the manifest; a slot says for itself what its bytes are
    attributes: dict[str, object] = {}
    if item.sharing == "sharded":
        attributes = {"global_shape": item.global_shape, "extents": [[*vars(e).values()] for e in item.extents[:64]]}
    return container.Spec(
        path=layout.dataset_path(item.name), dtype=item.dtype, shape=item.shape, attributes=attributes
    )


def slot_items(flat: Flat, offsets: tuple[int | None, ...]) -> Iterator[Item]:
    """Items as manifests have them, without hashes."""
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
