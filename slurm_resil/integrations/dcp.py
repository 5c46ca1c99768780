"""Storage of torch.distributed.checkpoint: ``dcp.save(..., storage_writer=Writer(path))`` and ``dcp.load`` likewise.

A save has a directory of its own in ``path`` (see :mod:`slurm_resil.ckpt.saved`): a slot and a manifest of each rank,
and last the record, with which it begins to count. There is no pickle in any file: what is not a tensor is stored as a
tree of plain values, and torch's own form of it is made in memory, for the planner.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import time
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from slurm_resil.ckpt import dtypes, saved, sharding
from slurm_resil.ckpt import state as states
from slurm_resil.ckpt.flat import FlatItem, raw_bytes
from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.planning import OBJECT_KINDS, holds
from slurm_resil.ckpt.saved import Save
from slurm_resil.ckpt.snapshot import slot_items, slot_spec
from slurm_resil.core import faults
from slurm_resil.core.errors import DataError, StateError, UsageError
from slurm_resil.format import layout
from slurm_resil.format.manifest import Extent
from slurm_resil.integrations.dcpfind import Record, encoded
from slurm_resil.integrations.dcpread import Reader as Reader

log = logging.getLogger(__name__)
_used: dict[str, str] = {}  # directory -> token of the newest save that this process has written to


class Writer(StorageWriter):
    """Storage writer for ``dcp.save`` and ``dcp.async_save``, by thread and by process.

    A save never touches the one before: that is removed once the new one is complete, which means written, fsynced,
    read back and compared with its hashes by all ranks. One program at a time may save to a directory.

    Args:
        path: Directory, the same on all ranks; made if it is not there.
        iteration: Number of the next save; default: one more than the largest that is there.
        keep: Complete checkpoints that stay, at least 1.
    """

    def __init__(self, path: str | os.PathLike[str], *, iteration: int | None = None, keep: int = 1) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep}: at least the newest checkpoint stays", mend="as in keep=1")
        self._root, self._iteration, self._keep = os.path.abspath(path), iteration, keep
        self._save: Save | None = None

    @property
    def checkpoint_id(self) -> str:
        """The directory."""
        return self._root

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew; ``checkpoint_id`` is another directory."""
        self._save = None
        if checkpoint_id:
            self._root = os.path.abspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See StorageWriter.

        Raises:
            UsageError: Without collectives nobody knows whether a checkpoint is complete.
        """
        del is_coordinator, args
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False: no rank would know whether the checkpoint is complete",
                mend="leave it out, or use slurm_resil.async_save, which needs no collectives",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See StorageWriter."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the save and create its directory; on the coordinator.

        Raises:
            SpaceError: Storage is full or read-only.
            OSError: The directory cannot be made.
        """
        with saved.refusals(self._root, 0):
            save = saved.new(self._root, "dcp", len(plans), iteration=self._iteration)
            save.make()
        self._save = save
        return [
            dataclasses.replace(plan, storage_data={**dataclasses.asdict(save), "rank": rank})
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's slot, read it back and publish its manifest; see StorageWriter.

        Raises:
            StateError: Something cannot be stored; names its path.
            SpaceError: Storage is full or read-only.
            DataError: What is read back is not what was written.
        """
        started = time.perf_counter()
        place = dict(plan.storage_data)
        rank = place.pop("rank")
        save = self._current(Save(**{**place, "root": self._root}))
        parts, values = _Parts(planner), {}
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                values[item.index.fqn] = _object(planner, item)
            else:
                parts.add(item)
        flat = flatten(values)
        _refuse_objects(flat.values, flat.items)
        items = (*parts.items, *flat.items)

        def read(index: int) -> memoryview:
            return raw_bytes(
                parts.tensor(index) if index < len(parts.items) else flat.sources[index - len(parts.items)]
            )

        name, generation, offsets = saved.write_slot(save, rank, [slot_spec(item) for item in items], read)
        faults.point("dcp.slot")
        found = tuple(slot_items(dataclasses.replace(flat, items=items), offsets))
        costs = {"copy": time.perf_counter() - started}
        draft = saved.draft(save, rank, found, flat.values, (name, generation), costs)
        saved.seal_slot(save, draft)
        faults.point("dcp.sealed")
        results = [
            WriteResult(index=item.index, size_in_bytes=item.tensor_storage_size() or 0, storage_data=save.name)
            for item in plan.items
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the record, then remove what this save replaces; on the coordinator.

        Raises:
            DataError: A rank has written to another save, or to none.
            StateError: The planner's data cannot be stored.
        """
        save = self._save
        assert save is not None, "prepare_global_plan comes first"
        odd = sorted({result.storage_data for of_rank in results for result in of_rank} - {save.name})
        missing = sorted(set(range(save.world_size)) - save.sealed())
        if odd or missing:
            what = f"ranks {missing} have no manifest" if missing else f"a rank has written to {odd[0]}"
            raise DataError(f"{save.path} is not complete: {what}", mend="look whether all nodes see this directory")
        faults.point("dcp.finish")
        entries = metadata.state_dict_metadata
        record = Record(
            name=save.name,
            tensors=tuple(name for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)),
            planner=encoded(metadata.planner_data, ("planner_data",)),
            created_s=time.time(),
        )
        with saved.refusals(self._root, 0):
            record.publish(save.record, sync=True)
        faults.point("dcp.published")
        metadata.storage_meta = self.storage_meta()
        try:
            saved.prune(self._root, "dcp", self._keep)
        except OSError as error:  # the new one is complete all the same
            log.warning("slurm-resil: old checkpoints in %s could not be removed: %s", self._root, error)

    def storage_meta(self) -> StorageMeta:
        """See StorageWriter."""
        return StorageMeta(checkpoint_id=self._root, save_id=self._save.name if self._save else None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a directory."""
        return bool(os.fspath(checkpoint_id)) and "://" not in os.fspath(checkpoint_id)

    def _current(self, named: Save) -> Save:
        """The save that is being written.

        A plan that the planner has cached names the save that it was made for; the coordinator has made the directory
        of the present one before it let the plans go.
        """
        save = self._save
        if save is None:
            save = named
            if named.token <= _used.get(self._root, ""):
                dcp = [one for one in saved.found(self._root) if one.kind == "dcp"]
                save = dcp[0] if dcp else named
        _used[self._root] = save.token
        return save


class _Parts:
    """Tensors of a plan, as items: the parts of a tensor that a rank has are one item."""

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner
        self._writes: dict[str, list[WriteItem]] = {}
        self._items: list[FlatItem] | None = None

    def add(self, item: WriteItem) -> None:
        """Add a part."""
        self._writes.setdefault(item.index.fqn, []).append(item)

    @property
    def items(self) -> list[FlatItem]:
        """The items, in the order of :meth:`tensor`."""
        if self._items is None:
            self._items = [self._describe(name, writes) for name, writes in self._writes.items()]
        return self._items

    def tensor(self, index: int) -> torch.Tensor:
        """The memory of an item."""
        item, writes = self.items[index], list(self._writes.values())[index]
        tensors = [self._resolve(write) for write in writes]
        if len(tensors) == 1:
            return tensors[0]
        packed = torch.zeros(item.shape, dtype=tensors[0].dtype)
        for part, extent in zip(tensors, item.extents, strict=True):
            there = tuple(slice(at, at + n) for at, n in zip(extent.local, extent.shape, strict=True))
            packed[there].copy_(part)
        return packed

    def _describe(self, fqn: str, writes: list[WriteItem]) -> FlatItem:
        tensors = [self._resolve(write) for write in writes]
        size = writes[0].tensor_data.size if writes[0].tensor_data else tensors[0].shape
        extents, at = [], 0
        for tensor, write in zip(tensors, writes, strict=True):
            if write.tensor_data is None or tuple(write.tensor_data.chunk.sizes) != tuple(tensor.shape):
                raise StateError(f"{fqn}: the plan and the tensor of shape {tuple(tensor.shape)} do not agree")
            start = tuple(write.tensor_data.chunk.offsets)
            local = tuple(at if dim == 0 else 0 for dim in range(tensor.ndim))
            extents.append(Extent(local=local, start=start, shape=tuple(tensor.shape)))
            at += tensor.shape[0] if tensor.ndim else 1
        shape = tuple(tensors[0].shape)
        if len(tensors) > 1:
            shape = (at, *(max(tensor.shape[dim] for tensor in tensors) for dim in range(1, tensors[0].ndim)))
        else:
            extents = self._strided(fqn) or extents
        return FlatItem(
            name=layout.join(fqn),
            dtype=dtypes.torch_name(tensors[0].dtype, fqn),
            shape=shape,
            sharing="sharded",
            global_shape=tuple(size),
            extents=tuple(extents),
        )

    def _strided(self, fqn: str) -> list[Extent]:
        """Boxes of a distributed tensor whose part is more than one box, of which a plan knows nothing."""
        live = getattr(self._planner, "state_dict", {}).get(fqn)
        part = sharding.part_of(live, fqn) if isinstance(live, DTensor) else None
        return list(part.extents) if part is not None and len(part.extents) > 1 else []

    def _resolve(self, write: WriteItem) -> torch.Tensor:
        tensor = self._planner.resolve_data(write)
        if not isinstance(tensor, torch.Tensor):
            raise StateError(f"{write.index.fqn}: the planner gives a {type(tensor).__name__} for a tensor")
        states.check_tensor(tensor, (write.index.fqn,))
        return tensor.detach()


def _object(planner: SavePlanner, item: WriteItem) -> object:
    """What a plan stores as bytes, as the object itself.

    Raises:
        StateError: The planner gives bytes that are not torch's form of plain values.
    """
    fqn = item.index.fqn
    kind: Any = type(planner)
    if isinstance(planner, DefaultSavePlanner) and (kind.resolve_data, kind.transform_object) == (
        DefaultSavePlanner.resolve_data,
        DefaultSavePlanner.transform_object,
    ):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise StateError(f"{fqn}: the planner gives a {type(data).__name__} for bytes")
    data.seek(0)
    try:
        return torch.load(data, weights_only=True)
    except Exception as error:
        text = f"{fqn}: the planner's bytes are not plain values in torch's form: {error}"
        raise StateError(text, mend="give the planner lookup_object, or plain values", state_path=fqn) from error


def _refuse_objects(values: Any, items: tuple[FlatItem, ...]) -> None:
    """Refuse what could not be made anew at a load, or is only a part of something.

    Raises:
        StateError: Names the first path.
    """
    for fqn, node in values["of"]:
        if holds(node, OBJECT_KINDS):
            raise StateError(
                f"{fqn}: a module, an optimizer or another object with state_dict() cannot be stored inside of a state",
                mend="give what its state_dict() returns",
                state_path=fqn,
            )
    for item in items:
        if item.sharing == "sharded":
            raise StateError(
                f"{item.name}: a sharded tensor inside of a tuple or another object cannot be stored",
                mend="put it into a dict or a list",
                state_path=item.name,
            )
