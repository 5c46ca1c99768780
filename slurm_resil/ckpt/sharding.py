"""Where a rank's part of a distributed tensor lies in the whole: the placements' own split, applied to indices.

Nothing is assumed about how a placement cuts: it is given the row numbers of each dimension to cut, so that uneven
shards and strided ones (FSDP2 over tensor parallelism) come out exactly as torch makes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from slurm_resil.core.errors import StateError
from slurm_resil.format.manifest import Extent


class Part(NamedTuple):  # quicker to make than a dataclass: there are as many as tensors
    """A rank's part of a global tensor; empty ``extents`` with ``whole`` says that it is all of it."""

    local: torch.Tensor
    global_shape: tuple[int, ...]
    extents: tuple[Extent, ...]
    whole: bool


def part_of(tensor: torch.Tensor, where: str) -> Part:
    """Describe a tensor, distributed or not.

    Raises:
        StateError: A placement cannot be stored (``Partial``).
    """
    if not isinstance(tensor, DTensor):
        return Part(local=tensor.detach(), global_shape=tuple(tensor.shape), extents=(), whole=True)
    with torch.no_grad():
        local = tensor.to_local().detach()
    shape = tuple(tensor.shape)
    for placement in tensor.placements:
        if not isinstance(placement, Shard | Replicate | _StridedShard):
            raise StateError(
                f"{where}: a distributed tensor placed as {placement} cannot be stored",
                mend="redistribute it to Shard or Replicate before saving",
            )
    if all(isinstance(placement, Replicate) for placement in tensor.placements):
        return Part(local=local, global_shape=shape, extents=(), whole=True)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        rows = [torch.arange(0) for _ in shape]
    else:
        rows = _rows(shape, tensor.placements, [tensor.device_mesh.size(i) for i in range(len(coordinate))], coordinate)
    sizes = tuple(len(row) for row in rows)
    if coordinate is not None and sizes != tuple(local.shape):
        raise StateError(f"{where}: the local shard has shape {tuple(local.shape)}, its placements say {sizes}")
    return Part(local=local, global_shape=shape, extents=_extents(rows), whole=False)


def _rows(
    shape: Sequence[int], placements: Sequence[object], mesh: Sequence[int], coordinate: Sequence[int]
) -> list[torch.Tensor]:
    """Global indices that this rank holds, per dimension of the tensor; mesh dimensions are applied left to right."""
    rows = [torch.arange(size) for size in shape]
    for placement, chunks, mine in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, _StridedShard):
            dim = placement.dim % max(len(shape), 1)
            cut: Shard | _StridedShard = _StridedShard(0, split_factor=placement.split_factor)
        elif isinstance(placement, Shard):
            dim, cut = placement.dim % max(len(shape), 1), Shard(0)
        else:
            continue
        pieces, _ = cut._split_tensor(rows[dim], chunks, with_padding=False, contiguous=False)
        rows[dim] = pieces[mine]
    return rows


def _runs(row: torch.Tensor) -> list[tuple[int, int, int]]:
    """Consecutive runs as (local start, global start, length)."""
    if not len(row):
        return []
    breaks = (torch.nonzero(row[1:] != row[:-1] + 1).flatten() + 1).tolist()
    edges = [0, *breaks, len(row)]
    return [(start, int(row[start]), stop - start) for start, stop in itertools.pairwise(edges)]


def _extents(rows: Sequence[torch.Tensor]) -> tuple[Extent, ...]:
    found = []
    for combination in itertools.product(*(_runs(row) for row in rows)):
        local, start, size = zip(*combination, strict=True) if combination else ((), (), ())
        found.append(Extent(local=tuple(local), start=tuple(start), shape=tuple(size)))
    return tuple(found)
