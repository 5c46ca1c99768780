"""Storage reader of torch.distributed.checkpoint: saves of :class:`~slurm_resil.integrations.dcp.Writer` and others.

Whatever was saved, the planner is told of whole tensors; what a rank needs of them is put together from the shards.
Everything is compared with its hash before the first tensor is touched.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from slurm_resil.ckpt import dtypes, sharding
from slurm_resil.ckpt.options import listed
from slurm_resil.ckpt.planning import Plan
from slurm_resil.ckpt.source import Want, fresh
from slurm_resil.core.errors import ResilError, StateError
from slurm_resil.format.manifest import Extent
from slurm_resil.integrations.dcpfind import Found, find


class Reader(StorageReader):
    """Storage reader for ``dcp.load``.

    Args:
        path: Directory of a Writer or of ``slurm_resil.async_save``, one save in it, a run's directory with drained
            checkpoints, or a drained file. What was not saved by torch.distributed.checkpoint has the names that
            ``get_state_dict`` gives, where there are such: ``model.<parameter>``,
            ``optimizer.state.<parameter>.exp_avg``.
        iteration: Which checkpoint; default: the one saved last.
        cast: Tensors of another type are converted; without it they are an error.
    """

    def __init__(self, path: str | os.PathLike[str], *, iteration: int | None = None, cast: bool = False) -> None:
        self._path, self._iteration, self._cast = os.path.abspath(path), iteration, cast
        self._found: Found | None = None
        self._error: ResilError | OSError | None = None

    @property
    def checkpoint_id(self) -> str:
        """The path."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew; ``checkpoint_id`` is another path."""
        self._found = self._error = None
        if checkpoint_id:
            self._path = os.path.abspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Find the checkpoint. What is wrong with it is raised later, where it reaches all ranks as it is."""
        del args, kwargs
        self._found, self._error = None, None
        try:
            self._found = found = find(self._path, self._iteration)
        except (ResilError, OSError) as error:
            self._error = error
            return Metadata({})
        entries: dict[str, Any] = {}
        for name, tensor in found.tensors.items():
            size = torch.Size(tensor.shape)
            whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            properties = TensorProperties(dtype=dtypes.torch_dtype(tensor.dtype, name))
            entries[name] = TensorStorageMetadata(properties=properties, size=size, chunks=[whole])
        entries.update({name: BytesStorageMetadata() for name in found.nodes})
        return Metadata(entries, planner_data=found.planner, storage_meta=StorageMeta(checkpoint_id=self._path))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See StorageReader.

        Raises:
            DataError: There is no checkpoint, or it is damaged.
        """
        del metadata, is_coordinator, args, kwargs
        if self._error is not None:
            raise self._error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See StorageReader."""
        plan.storage_data = self._here.name
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See StorageReader.

        Raises:
            StateError: Ranks have found different checkpoints.
        """
        names = sorted({str(plan.storage_data) for plan in plans})
        if len(names) > 1:
            raise StateError(
                f"the ranks have found different checkpoints in {self._path}: {listed(names)}",
                mend="load when nobody saves to it, or say which by iteration=",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verify everything that is needed, then fill it in; see StorageReader.

        Raises:
            StateError: A type or a name does not fit; nothing was changed.
            DataError: The bytes are not what they claim to be; nothing was changed.
        """
        found = self._here
        source = found.open()
        with source:
            values = Plan(source, {"$": "dict", "of": []})
            reads = _Reads(found, planner, cast=self._cast)
            made: list[tuple[ReadItem, Callable[[], Any]]] = []
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    fqn = item.storage_index.fqn
                    made.append((item, values.decoding(found.nodes[fqn], (fqn,))))
                else:
                    reads.add(item)
            values.faults += reads.faults
            values.faults += [fault for want, _, _ in reads.wants if (fault := source.misfit(want))]
            values.refuse()
            source.verify([*values.wants, *(want for want, _, _ in reads.wants)])
            values.run()
            for want, target, done in reads.wants:
                if dtypes.torch_name(target.dtype, want.where) == want.dtype:
                    source.fill(want, target)
                else:
                    one = fresh(want.dtype, want.local_shape, want.where)
                    assert isinstance(one, torch.Tensor)
                    source.fill(want, one)
                    target.copy_(one)
                done()
            for item, value in made:
                planner.load_bytes(item, _torch_form(value()))
            found.check_again(source)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a path."""
        return bool(os.fspath(checkpoint_id)) and "://" not in os.fspath(checkpoint_id)

    @property
    def _here(self) -> Found:
        assert self._found is not None, "read_metadata comes first"
        return self._found


class _Reads:
    """Tensors that are read.

    Attributes:
        wants: What is wanted, where it goes, and what to do after.
        faults: What does not fit, for a person.
    """

    def __init__(self, found: Found, planner: LoadPlanner, *, cast: bool) -> None:
        self._found, self._planner, self._cast = found, planner, cast
        self.wants: list[tuple[Want, torch.Tensor, Callable[[], None]]] = []
        self.faults: list[str] = []
        self._strided: set[str] = set()

    def add(self, item: ReadItem) -> None:
        """Add what the planner asks for."""
        planner, fqn = self._planner, item.dest_index.fqn
        live = getattr(planner, "state_dict", {}).get(fqn)
        if isinstance(live, DTensor):
            part = sharding.part_of(live, fqn)
            if len(part.extents) > 1:  # several boxes, of which the plan has only the first one's place
                if fqn not in self._strided:
                    self._strided.add(fqn)
                    self._want(item.storage_index.fqn, part.local, part.extents, lambda: None)
                return
        target = planner.resolve_tensor(item).detach()
        lengths = tuple(item.lengths)
        if tuple(target.shape) != lengths:
            self.faults.append(f"{fqn}: the planner gives a place of shape {tuple(target.shape)} for {lengths}")
            return
        zero = (0,) * len(lengths)
        box = Extent(local=zero, start=tuple(item.storage_offsets), shape=lengths)
        self._want(item.storage_index.fqn, target, (box,), lambda: planner.commit_tensor(item, target))

    def _want(self, fqn: str, target: torch.Tensor, extents: tuple[Extent, ...], done: Callable[[], None]) -> None:
        stored = self._found.tensors[fqn]
        dtype = dtypes.torch_name(target.dtype, fqn)
        if dtype != stored.dtype and not (self._cast and dtypes.can_cast(stored.dtype, dtype)):
            mend = "" if self._cast else " (Reader(path, cast=True) converts)"
            self.faults.append(f"{fqn}: {stored.dtype} in the checkpoint, {dtype} in the state{mend}")
            return
        want = Want(
            name=stored.item,
            dtype=stored.dtype,
            local_shape=tuple(target.shape),
            global_shape=stored.shape,
            extents=extents,
            whole=False,
            where=fqn,
        )
        self.wants.append((want, target, done))


def _torch_form(value: object) -> io.BytesIO:
    """What the planner expects: the value as torch.save writes it. It never leaves this process."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
