"""Bytes of the sealed shards of this node."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import numpy as np

from slurm_resil.comm.base import Bytes, Int64s
from slurm_resil.core import fsio
from slurm_resil.core.errors import DataError
from slurm_resil.drain import boxes
from slurm_resil.drain.plan import VALUES, VALUES_DTYPE, Head, Source
from slurm_resil.format import blocks
from slurm_resil.format.manifest import Item, ShardManifest, digest

READ_BYTES = 8 << 20


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
                self.items[manifest.rank], self._values[manifest.rank] = items_of(manifest)
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
                fsio.pread_into(self._fds[source.rank], view[at : at + size], base + start, self._names[source.rank])
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


def items_of(manifest: ShardManifest) -> tuple[list[Item], bytes]:
    """Items of a shard with its values as one more, and the text of these."""
    text = json.dumps(manifest.values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    size, xxh3 = len(text), digest(text)
    values = Item(name=VALUES, dtype=VALUES_DTYPE, shape=(size,), offset=0, nbytes=size, sharing="private", xxh3=xxh3)
    return [*manifest.items, values], text


def _head(manifest: ShardManifest, mover: int) -> Head:
    names = ("node", "run_id", "job_id", "attempt", "iteration", "rank", "world_size", "metrics")
    return Head(mover=mover, **{name: getattr(manifest, name) for name in names})
