"""Sealed shards of this node: which there are, which checkpoint to drain, and their bytes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_resil.comm.base import Bytes, Int64s
from slurm_resil.core import paths
from slurm_resil.core.errors import DataError, ResilError, TryAgainError
from slurm_resil.drain import boxes
from slurm_resil.drain.plan import VALUES, VALUES_DTYPE, Head, Source
from slurm_resil.format import blocks
from slurm_resil.format.manifest import Item, ShardManifest, digest
from slurm_resil.format.world import words

READ_BYTES = 8 << 20


def listed(job_dir: str) -> dict[int, list[int]]:
    """Ranks with a manifest by iteration; nothing if there is no such directory."""
    found: dict[int, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(os.path.join(job_dir, "manifests")):
            parsed = paths.parse_manifest(name)
            if parsed is not None:
                found.setdefault(parsed[0], []).append(parsed[1])
    return found


def load(job_dir: str, iteration: int) -> tuple[list[ShardManifest], list[str]]:
    """Read this node's manifests of an iteration.

    Returns:
        Those that are right, and what is wrong with each other one.
    """
    good, bad = [], []
    for rank in sorted(listed(job_dir).get(iteration, ())):
        path = paths.manifest(job_dir, iteration, rank)
        try:
            manifest = ShardManifest.load(path)
            if (manifest.iteration, manifest.rank) != (iteration, rank):
                raise DataError(f"{path} is of iteration {manifest.iteration}, rank {manifest.rank}")
            good.append(manifest)
        except FileNotFoundError:
            continue
        except ResilError as error:
            bad.append(error.message)
    return good, bad


@dataclass(frozen=True, kw_only=True)
class Found:
    """A manifest that some mover has; what is needed to choose."""

    mover: int
    rank: int
    run_id: str
    job_id: int
    attempt: int
    world_size: int
    created_s: float

    @classmethod
    def of(cls, manifest: ShardManifest, mover: int) -> Found:
        """Pick what is needed of a manifest."""
        names = ("rank", "run_id", "job_id", "attempt", "world_size", "created_s")
        return cls(mover=mover, **{name: getattr(manifest, name) for name in names})


def choose(found: Sequence[Found], bad: Sequence[str], iteration: int) -> dict[int, Found]:
    """Choose the shards that make the checkpoint of an iteration.

    The same iteration may have been sealed by an earlier attempt too, on nodes that have other ranks now: shards of
    different attempts are never mixed, and the newest attempt counts.

    Returns:
        What was chosen, by rank.

    Raises:
        DataError: A manifest is broken, or shards of two runs or world sizes are there.
        TryAgainError: Some ranks have not sealed; names them.
    """
    newest = max(((f.job_id, f.attempt) for f in found), default=None)
    taken = [f for f in found if (f.job_id, f.attempt) == newest]
    kinds = sorted({(f.run_id, f.world_size) for f in taken})
    if len(kinds) > 1:
        text = " and ".join(f"run {run}, world size {size}" for run, size in kinds)
        raise DataError(f"shards of different checkpoints in iteration {iteration}: {text}")
    chosen: dict[int, Found] = {}
    for one in sorted(taken, key=lambda f: (f.rank, -f.created_s, f.mover)):
        chosen.setdefault(one.rank, one)
    size = kinds[0][1] if kinds else 0
    missing = sorted(set(range(size)) - set(chosen))
    if bad:
        gone = f" (no shard of {words(missing)})" if missing else ""
        raise DataError(f"iteration {iteration}{gone}: {'; '.join(bad)}")
    if missing:
        here = f"attempt {newest[1]}" if newest else ""
        raise TryAgainError(
            f"iteration {iteration} is not sealed by {words(missing)} of {size} ({here})",
            mend="wait until all ranks have sealed, or drain an earlier iteration",
        )
    if not chosen:
        raise TryAgainError(f"iteration {iteration} is sealed by no rank", mend="look with `slurm-resil ckpt ls`")
    return chosen


class Slots:
    """Open slots of this node's shards.

    Args:
        job_dir: Job's directory in the burst buffer.
        manifests: Shards to read.
        mover: Own number.

    Attributes:
        heads: Heads of the shards.
        items: Their items by rank, the values among them.

    Raises:
        DataError: A slot is missing or too short; names it and the rank.
    """

    def __init__(self, job_dir: str, manifests: Sequence[ShardManifest], mover: int) -> None:
        self._fds: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._values: dict[int, bytes] = {}
        self.heads: list[Head] = []
        self.items: dict[int, list[Item]] = {}
        try:
            for manifest in manifests:
                self._open(job_dir, manifest)
                self.heads.append(_head(manifest, mover))
                self.items[manifest.rank] = self._items(manifest)
        except BaseException:
            self.close()
            raise

    def _open(self, job_dir: str, manifest: ShardManifest) -> None:
        path = os.path.join(job_dir, "slots", os.path.basename(manifest.slot))
        who = f"rank {manifest.rank} on {manifest.node}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise DataError(f"slot {path} of {who} is missing", path=path) from error
        self._fds[manifest.rank], self._names[manifest.rank] = fd, f"{path} of {who}"
        size = os.fstat(fd).st_size
        need = max((item.offset + item.nbytes for item in manifest.items if item.offset is not None), default=0)
        if size < need:
            raise DataError(f"slot {path} of {who} is truncated: {size} of {need} bytes", path=path)

    def _items(self, manifest: ShardManifest) -> list[Item]:
        text = json.dumps(manifest.values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        self._values[manifest.rank] = text
        size, xxh3 = len(text), digest(text)
        values = Item(
            name=VALUES, dtype=VALUES_DTYPE, shape=(size,), offset=0, nbytes=size, sharing="private", xxh3=xxh3
        )
        return [*manifest.items, values]

    def close(self) -> None:
        """Close all."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def read(self, source: Source, part: int, first: int, last: int, out: Bytes) -> None:
        """Read a slice of a part of a source.

        Args:
            source: Of a shard of this node.
            part: Index of the part.
            first: Start of the slice in the part's stream, bytes.
            last: Its end.
            out: Where to, ``last - first`` bytes.

        Raises:
            DataError: The slot ends too early.
            OSError: It cannot be read.
        """
        runs = source.runs(part, first, last)
        offset, length = boxes.segments(runs.source, runs.length)
        self._read(source, offset, length, out)

    def _read(self, source: Source, offset: Int64s, length: Int64s, out: Bytes) -> None:
        values = self._values[source.rank] if source.item.dtype == VALUES_DTYPE else None
        base, at = source.item.offset or 0, 0
        view = out.data
        for start, size in zip(offset.tolist(), length.tolist(), strict=True):
            if values is not None:
                view[at : at + size] = values[start : start + size]
            else:
                pread_into(self._fds[source.rank], view[at : at + size], base + start, self._names[source.rank])
            at += size

    def flaw(self, source: Source) -> str:
        """Compare a whole item with the seal's hash; says what is wrong, empty if nothing is.

        Raises:
            OSError: It cannot be read.
        """
        state = blocks.ItemHash(source.item.block_bytes)
        buffer = np.empty(min(READ_BYTES, max(source.item.nbytes, 1)), np.uint8)
        whole = source.item.nbytes
        try:
            for at in range(0, whole, buffer.size):
                part = buffer[: min(buffer.size, whole - at)]
                self._read(source, np.array([at]), np.array([part.size]), part)
                state.update(part.data)
        except DataError as error:
            return error.message
        found = state.finish()
        if found[0] == source.item.xxh3:
            return ""
        # the plan's items come without the hashes of their blocks
        key = (source.item.name, source.item.dtype)
        sealed = next(item for item in self.items[source.rank] if (item.name, item.dtype) == key)
        return f"{self._names[source.rank]}: {blocks.flaw(sealed, found)}"


def _head(manifest: ShardManifest, mover: int) -> Head:
    names = ("node", "run_id", "job_id", "attempt", "iteration", "rank", "world_size", "metrics")
    return Head(mover=mover, **{name: getattr(manifest, name) for name in names})


def pread_into(fd: int, view: memoryview, offset: int, name: str) -> None:
    """Fill a buffer from a file.

    Raises:
        DataError: The file ends before.
        OSError: It cannot be read.
    """
    while view:
        done = os.preadv(fd, [view], offset)
        if done == 0:
            raise DataError(f"{name} is truncated: it ends at byte {offset}")
        view, offset = view[done:], offset + done
