"""The stamp of a slot: what the slot holds, and whether it was being written. It lies in front of the HDF5 superblock.

A writer first breaks the end mark, then writes the head, the data and last the end mark. Who reads the slot compares
the stamp with the manifest before and after: a slot that was reused meanwhile has another generation.

Layout, little-endian 64-bit words: at byte 0 magic, generation, iteration, rank, world size, job id, attempt, xxh3-64
of the run id; at byte 256 the end mark, which is the generation again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import xxhash

from slurm_resil.core.errors import DataError
from slurm_resil.core.model import RunInfo
from slurm_resil.format.manifest import ShardManifest

MAGIC = int.from_bytes(b"RESILSLT", "little")
BYTES = 512
_HEAD = struct.Struct("<8Q")
_END_AT = 256
_END = struct.Struct("<Q")
RANGES = ((0, _HEAD.size), (_END_AT, _END_AT + _END.size))  # bytes that hold it


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """See the module; ``end`` equals ``generation`` when the slot was written to its end."""

    generation: int
    iteration: int
    rank: int
    world_size: int
    job_id: int
    attempt: int
    run: int
    end: int = 0

    @property
    def complete(self) -> bool:
        """Whether the writer came to its end."""
        return self.end == self.generation


def run_word(run_id: str) -> int:
    """Word that stands for a run id."""
    return xxhash.xxh3_64_intdigest(run_id.encode("utf-8", "surrogatepass"))


def make(run: RunInfo, *, generation: int, iteration: int, rank: int) -> Stamp:
    """Build the stamp of a shard that is about to be written."""
    return Stamp(
        generation=generation,
        iteration=iteration,
        rank=rank,
        world_size=run.world_size,
        job_id=run.job_id,
        attempt=run.attempt,
        run=run_word(run.run_id),
    )


def begin(buffer: Any, stamp: Stamp) -> None:
    """Say in a mapped slot that it is being written."""
    _END.pack_into(buffer, _END_AT, 0)
    words = (stamp.iteration, stamp.rank, stamp.world_size, stamp.job_id, stamp.attempt, stamp.run)
    _HEAD.pack_into(buffer, 0, MAGIC, stamp.generation, *words)


def end(buffer: Any, stamp: Stamp) -> None:
    """Say in a mapped slot that it is complete."""
    _END.pack_into(buffer, _END_AT, stamp.generation)


def read(buffer: Any, *, where: str) -> Stamp:
    """Read the stamp of a slot.

    Raises:
        DataError: There is none (fault ``torn``).
    """
    if len(buffer) < BYTES:
        raise DataError(f"{where} is truncated: {len(buffer)} bytes", fault="truncated")
    magic, generation, iteration, rank, world_size, job_id, attempt, run = _HEAD.unpack_from(buffer, 0)
    if magic != MAGIC:
        raise DataError(f"{where} is torn: it has no stamp of a slot", fault="torn")
    return Stamp(
        generation=generation,
        iteration=iteration,
        rank=rank,
        world_size=world_size,
        job_id=job_id,
        attempt=attempt,
        run=run,
        end=_END.unpack_from(buffer, _END_AT)[0],
    )


def check(buffer: Any, manifest: ShardManifest, where: str) -> None:
    """Compare the stamp in a slot with a manifest.

    Raises:
        DataError: Torn, stale or swapped.
    """
    stamp = read(buffer, where=where)
    pairs = {
        "rank": (stamp.rank, manifest.rank),
        "iteration": (stamp.iteration, manifest.iteration),
        "world size": (stamp.world_size, manifest.world_size),
        "job": (stamp.job_id, manifest.job_id),
        "attempt": (stamp.attempt, manifest.attempt),
        "run": (stamp.run, run_word(manifest.run_id)),
    }
    if stamp.generation == manifest.generation and not stamp.complete:
        raise DataError(f"{where} is torn: its writer did not come to the end", fault="torn")
    if (stamp.rank, stamp.run) == (manifest.rank, pairs["run"][1]) and stamp.generation != manifest.generation:
        raise DataError(
            f"{where} is stale: it now holds iteration {stamp.iteration}, written after this manifest's iteration "
            f"{manifest.iteration} or in its place",
            fault="stale",
        )
    for what, (found, expected) in pairs.items():
        if found != expected:
            text = "" if what == "run" else f" {found}, not {expected}"
            raise DataError(f"{where} is swapped: it is of another {what}{text}", fault="swapped")
    if stamp.generation != manifest.generation:
        raise DataError(f"{where} is stale: generation {stamp.generation}", fault="stale")
