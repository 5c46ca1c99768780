"""The last steps of a drain, for whoever takes them: what the file is of, its structure, its manifest and its name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from slurm_resil.core import faults, paths
from slurm_resil.core.log import now_s
from slurm_resil.drain.between import gaps, hash_of, within
from slurm_resil.drain.part import Part, Prepared, clear_older
from slurm_resil.drain.plan import Plan, Target
from slurm_resil.drain.readback import shares
from slurm_resil.format.manifest import BLOCK_BYTES, DrainedItem, DrainedManifest, ShardManifest, digest


def seal(manifest: ShardManifest) -> str:
    """Hash of what a shard holds."""
    return digest("".join(item.name + item.xxh3 for item in manifest.items).encode())


def contents(seals: Iterable[tuple[int, str]]) -> str:
    """Hash of all seals, given as rank and :func:`seal`: another one is of other contents."""
    return digest("".join(one for _, one in sorted(seals)).encode())


def cuts(plan: Plan, made: Prepared, movers: int) -> list[int]:
    """Blocks at which the movers' parts of the table begin, and their number."""
    return shares(plan, made.offsets, made.file_bytes, movers, BLOCK_BYTES)


def frames(plan: Plan, path: str, made: Prepared, movers: int) -> list[str]:
    """Hash what lies between the data, for each mover's share of the blocks.

    Raises:
        OSError: The file cannot be read.
    """
    between = gaps(made.offsets, plan, made.file_bytes)
    edges = [min(cut * BLOCK_BYTES, made.file_bytes) for cut in cuts(plan, made, movers)]
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [hash_of(fd, within(between, begin, end)) for begin, end in pairwise(edges)]
    finally:
        os.close(fd)


def describe(plan: Plan, made: Prepared, blocks: Sequence[str], costs_s: Mapping[str, float]) -> DrainedManifest:
    """Manifest of a file that was read back."""
    head = plan.head
    return DrainedManifest(
        run_id=head.run_id,
        job_id=head.job_id,
        attempt=head.attempt,
        iteration=head.iteration,
        world_size=head.world_size,
        file=os.path.basename(paths.drained("", head.iteration)),
        file_bytes=made.file_bytes,
        block_bytes=BLOCK_BYTES,
        blocks=tuple(blocks),
        items=tuple(_item(target, offset) for target, offset in zip(plan.targets, made.offsets, strict=True)),
        written_bytes=plan.loads,
        created_s=now_s(),
        costs_s={name: round(value, 4) for name, value in costs_s.items()},
        metrics=dict(head.metrics),
    )


def publish(run_dir: str, part: Part, manifest: DrainedManifest) -> None:
    """Give the file its name, then publish its manifest; the caller holds the lease and has checked it.

    Raises:
        OSError: Storage refused.
    """
    where = paths.drained_manifest(run_dir, manifest.iteration)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(where)  # of a file that is not whole, see durable()
    part.publish()
    faults.point("drain.publish")
    manifest.publish(where, sync=True)
    part.forget()
    clear_older(run_dir, manifest.iteration)


def _item(target: Target, offset: int | None) -> DrainedItem:
    return DrainedItem(
        name=target.name,
        dtype=target.dtype,
        shape=target.shape,
        offset=offset,
        nbytes=target.nbytes,
        rank=target.rank,
    )
