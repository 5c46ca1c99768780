"""Which blocks of a drained file the ranks of a node will read, as far as that is known before they start.

What a rank wants of its tensors lies in the burst buffer (``described/wanted-<rank>.json``) where it has trained on
this node before. Where it has not, it is taken to want all that belongs to all ranks, and its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError, UsageError
from slurm_resil.format import layout
from slurm_resil.format.manifest import DrainedItem, DrainedManifest, Extent, ShardManifest
from slurm_resil.format.ranges import ranges
from slurm_resil.format.staged import Blocks

MOST_EXTENTS = 64  # of more a rank has said only the first ones
Wanted = Mapping[str, Sequence[Extent] | None]
"""What a rank wants of each tensor by name; None: all of it."""


@dataclass(frozen=True)
class Need:
    """What a node needs.

    Attributes:
        blocks: Blocks that any of its ranks will read.
        alone: How many blocks its ranks would read, each by itself.
    """

    blocks: Blocks
    alone: int


def everything(manifest: DrainedManifest, readers: int = 1) -> Need:
    """All blocks, for so many readers."""
    count = len(manifest.blocks)
    return Need(np.ones(count, np.bool_), count * readers)


def need(manifest: DrainedManifest, job_dir: str, ranks: range, world_size: int) -> Need:
    """What the ranks of a node need.

    Args:
        manifest: Of the drained file.
        job_dir: Job's directory in this node's burst buffer.
        ranks: Its ranks.
        world_size: Number of all ranks now.

    Returns:
        Nothing for ranks that have their shard of the very checkpoint here: they read that.
    """
    if world_size != manifest.world_size:
        return everything(manifest, len(ranks))
    blocks, alone = np.zeros(len(manifest.blocks), np.bool_), 0
    for rank in ranks:
        if not _sealed_here(manifest, job_dir, rank):
            mine = _of_rank(manifest, rank, wanted(job_dir, rank))
            blocks |= mine
            alone += int(np.count_nonzero(mine))
    return Need(blocks, alone)


def _sealed_here(manifest: DrainedManifest, job_dir: str, rank: int) -> bool:
    with contextlib.suppress(OSError, DataError):
        shard = ShardManifest.load(paths.manifest(job_dir, manifest.iteration, rank))
        return (shard.run_id, shard.attempt) == (manifest.run_id, manifest.attempt)
    return False


def wanted(job_dir: str, rank: int) -> Wanted | None:
    """What a rank has said of its tensors when it trained on this node; None if it has not, or not so that it is sure.

    It is a help and no more: what it does not say the rank reads by itself.
    """
    try:
        raw = fsio.read_json(paths.described(job_dir, f"wanted-{rank}"))
        group = layout.dataset_path("")
        return {name.removeprefix(group): _extents(attributes) for name, _, _, attributes in raw["specs"]}
    except (OSError, DataError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _extents(attributes: Mapping[str, Sequence[Sequence[Sequence[int]]]]) -> list[Extent] | None:
    extents = attributes.get("extents")
    if extents is None or len(extents) >= MOST_EXTENTS:
        return None
    return [Extent(local=tuple(at), start=tuple(start), shape=tuple(shape)) for at, start, shape in extents]


def _of_rank(manifest: DrainedManifest, rank: int, said: Wanted | None) -> Blocks:
    found = np.zeros(len(manifest.blocks), np.bool_)
    for item in manifest.items:
        if item.offset is None or item.rank not in (None, rank):
            continue
        extents: Iterable[Extent] | None = None
        if said is not None and item.rank is None:
            if item.name not in said:
                continue
            extents = said[item.name]
        for start, stop in _bytes(item, extents):
            found[start // manifest.block_bytes : -(-stop // manifest.block_bytes)] = True
    return found


def _bytes(item: DrainedItem, extents: Iterable[Extent] | None) -> Iterator[tuple[int, int]]:
    """Ranges of the file that a rank reads of an item."""
    base = item.offset or 0
    if extents is not None:
        with contextlib.suppress(UsageError, ValueError):  # of another state by now
            yield from [
                (base + one.start, base + one.start + one.nbytes)
                for one in ranges(item.shape, layout.itemsize(item.dtype), list(extents))
            ]
            return
    yield base, base + item.nbytes


def newer_here(job_dir: str, iteration: int) -> bool:
    """Whether this node has redundancy of a newer checkpoint: most likely it is rebuilt, and restored."""
    with contextlib.suppress(OSError):
        found = (paths.parse_member(name) for name in os.listdir(paths.redundancy(job_dir)))
        return any(one is not None and one[0] > iteration for one in found)
    return False
