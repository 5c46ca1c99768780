"""A node's package: its shards of one checkpoint as one stream of bytes, as it is protected.

First the manifests of the shards, then their slots, each without the items that other nodes hold anyway (``omitted``).
All that is around the items is in it, so that a slot that is rebuilt is the very same file.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from slurm_resil.comm.base import Bytes
from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError, SpaceError
from slurm_resil.format import blocks, stamp
from slurm_resil.format.manifest import BLOCK_BYTES, Item, ShardManifest
from slurm_resil.redundancy.files import own_file


@dataclass(frozen=True, kw_only=True)
class Omitted:
    """An item that is not in the package.

    Attributes:
        offset: First byte in the slot.
        nbytes: Size.
        xxh3: Its hash, as in the manifest of the shard.
    """

    offset: int
    nbytes: int
    xxh3: str


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard of a package.

    Attributes:
        rank: Whose.
        slot: Name of the slot file.
        generation: Stamp of the slot's contents.
        file_bytes: Size of the slot file.
        manifest_bytes: Size of its manifest.
        omitted: What is left out, by offset.
    """

    rank: int
    slot: str
    generation: int
    file_bytes: int
    manifest_bytes: int
    omitted: tuple[Omitted, ...] = ()

    def kept(self) -> Iterator[tuple[int, int]]:
        """Byte ranges of the slot that are in the package, first and one after the last."""
        at = 0
        for one in self.omitted:
            if at < one.offset:
                yield at, one.offset
            at = one.offset + one.nbytes
        if at < self.file_bytes:
            yield at, self.file_bytes


@dataclass(frozen=True, kw_only=True)
class Package:
    """What a package consists of.

    Attributes:
        node: Name of the node when it was encoded.
        node_rank: Its place.
        shards: By rank.
        nbytes: Size of the stream.
        blocks: By chunk the hashes of its blocks of ``BLOCK_BYTES``; empty until it was encoded.
    """

    node: str
    node_rank: int
    shards: tuple[Shard, ...]
    nbytes: int
    blocks: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, node: str, node_rank: int, shards: Sequence[Shard]) -> Package:
        """Put shards together."""
        ordered = tuple(sorted(shards, key=lambda shard: shard.rank))
        nbytes = sum(shard.manifest_bytes + sum(b - a for a, b in shard.kept()) for shard in ordered)
        return cls(node=node, node_rank=node_rank, shards=ordered, nbytes=nbytes)

    @property
    def where(self) -> str:
        """Whose it is, for people."""
        return f"the shards of node {self.node} (place {self.node_rank})"

    @classmethod
    def from_raw(cls, raw: dict[str, Any]) -> Package:
        """Make one of its JSON.

        Raises:
            ValueError: Its size is not that of its shards, or ranges overlap.
        """
        shards = []
        for entry in raw["shards"]:
            omitted = tuple(Omitted(**one) for one in entry["omitted"])
            shard = Shard(**{**entry, "omitted": omitted})
            at = stamp.BYTES
            for one in omitted:
                if one.offset < at or one.nbytes <= 0:
                    raise ValueError(f"what is omitted of rank {shard.rank} overlaps")
                at = one.offset + one.nbytes
            if at > shard.file_bytes or os.path.basename(shard.slot) != shard.slot or not shard.slot.endswith(".h5"):
                raise ValueError(f"the slot of rank {shard.rank}")
            shards.append(shard)
        package = cls.of(raw["node"], raw["node_rank"], shards)
        if package.nbytes != raw["nbytes"]:
            raise ValueError(f"{package.where} have {package.nbytes} bytes, not {raw['nbytes']}")
        return cls(**{**vars(package), "blocks": tuple(tuple(chunk) for chunk in raw["blocks"])})


def describe(job_dir: str, manifest: ShardManifest, omit: Sequence[Item]) -> Shard:
    """Describe a shard, as it is to be in the package.

    Raises:
        OSError: Slot or manifest cannot be looked at.
    """
    omitted = [
        Omitted(offset=item.offset, nbytes=item.nbytes, xxh3=item.xxh3) for item in omit if item.offset is not None
    ]
    slot = os.path.join(job_dir, "slots", manifest.slot)
    return Shard(
        rank=manifest.rank,
        slot=manifest.slot,
        generation=manifest.generation,
        file_bytes=os.stat(slot, follow_symlinks=False).st_size,
        manifest_bytes=os.stat(paths.manifest(job_dir, manifest.iteration, manifest.rank)).st_size,
        omitted=tuple(sorted(omitted, key=lambda one: one.offset)),
    )


class _Layout:
    """Where the bytes of a package's stream lie: (shard, first byte in the slot) or a manifest."""

    def __init__(self, package: Package) -> None:
        self.starts: list[int] = []
        self.places: list[tuple[int, int]] = []  # index of the shard, offset in its slot; -1: in its manifest
        at = 0
        for index, shard in enumerate(package.shards):
            self.starts.append(at)
            self.places.append((index, -1))
            at += shard.manifest_bytes
        for index, shard in enumerate(package.shards):
            for start, stop in shard.kept():
                self.starts.append(at)
                self.places.append((index, start))
                at += stop - start
        self.starts.append(at)

    def pieces(self, at: int, size: int) -> Iterator[tuple[int, int, int, int]]:
        """Cut a range of the stream: (index of the shard, offset in the slot or -1, offset in the piece, size)."""
        number = bisect.bisect_right(self.starts, at) - 1
        while size > 0:
            start, stop = self.starts[number], self.starts[number + 1]
            part = min(size, stop - at)
            if part > 0:
                index, offset = self.places[number]
                yield index, offset, at - start, part
            at, size, number = at + part, size - part, number + 1


class PackageReader:
    """Reads a package of this node. Use as a context manager.

    Args:
        job_dir: Job's directory in the burst buffer.
        iteration: Iteration of the shards.
        package: What it consists of.

    Raises:
        DataError: A shard is not what the package says.
        OSError: Something cannot be read.
    """

    def __init__(self, job_dir: str, iteration: int, package: Package) -> None:
        self._job_dir, self._iteration, self.package = job_dir, iteration, package
        self._layout = _Layout(package)
        self._stack = contextlib.ExitStack()
        self._fds: list[int] = []
        self._names: list[str] = []
        self._texts: list[bytes] = []
        self.manifests: list[ShardManifest] = []
        try:
            for shard in package.shards:
                self._open(shard)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self, shard: Shard) -> None:
        path = paths.manifest(self._job_dir, self._iteration, shard.rank)
        try:
            text = fsio.read_bytes(path)
            manifest = ShardManifest.from_bytes(text, where=path)
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing", path=path, fault="missing") from error
        if (manifest.slot, manifest.generation, len(text)) != (shard.slot, shard.generation, shard.manifest_bytes):
            raise DataError(f"{path} is another one than was protected", path=path, fault="stale")
        name = os.path.join(self._job_dir, "slots", shard.slot)
        fd = own_file(name, size=shard.file_bytes)
        self._stack.callback(os.close, fd)
        self._fds.append(fd)
        self._names.append(name)
        self._texts.append(text)
        self.manifests.append(manifest)
        self.check_stamp(len(self._fds) - 1)

    def check_stamp(self, index: int) -> None:
        """Compare the stamp of a slot with its manifest.

        Raises:
            DataError: The slot was written again, or is torn.
        """
        head = np.empty(stamp.BYTES, np.uint8)
        fsio.pread_into(self._fds[index], head.data, 0, self._names[index])
        stamp.check(head, self.manifests[index], self._names[index])

    def check(self) -> None:
        """Check that all shards are still those of the package.

        Raises:
            DataError: One was written again.
        """
        for index, shard in enumerate(self.package.shards):
            self.check_stamp(index)
            if not os.path.exists(paths.manifest(self._job_dir, self._iteration, shard.rank)):
                raise DataError(f"the shard of rank {shard.rank} was given up meanwhile", fault="stale")

    def read(self, at: int, buffer: Bytes) -> Bytes:
        """See flow.Source.

        Raises:
            DataError: A slot ends too early.
            OSError: It cannot be read.
        """
        # read, not mapped even where it lies in memory: a fault for each page of a mapping costs more than the copy
        done, view = 0, buffer.data
        for index, offset, skip, size in self._layout.pieces(at, buffer.size):
            if offset < 0:
                view[done : done + size] = self._texts[index][skip : skip + size]
            else:
                fsio.pread_into(self._fds[index], view[done : done + size], offset + skip, self._names[index])
            done += size
        return buffer

    def words(self, start: int, stop: int) -> str:
        """Say for people what lies in a range of the stream and does not match its hash."""
        found: dict[str, str] = {}
        for index, offset, skip, _ in self._layout.pieces(start, stop - start):
            shard = self.package.shards[index]
            if offset < 0:
                found.setdefault(paths.manifest(self._job_dir, self._iteration, shard.rank), "")
            else:
                found.setdefault(self._names[index], f" (from byte {offset + skip} on)")
        names = [name + more for name, more in found.items()]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{', '.join(names[:3])}{more}: {'one of these' if len(names) > 1 else 'it'} does not match its hash"

    def read_slot(self, rank: int, at: int, out: Bytes) -> None:
        """Fill a buffer from a place in the slot of a rank.

        Raises:
            DataError: The slot ends too early.
            OSError: It cannot be read.
        """
        index = next(i for i, shard in enumerate(self.package.shards) if shard.rank == rank)
        fsio.pread_into(self._fds[index], out.data, at, self._names[index])


class PackageWriter:
    """Writes a package that was lost, beside the place where it belongs; :meth:`publish` puts it there.

    Use as a context manager: what is not published is removed.

    Args:
        job_dir: Job's directory in the burst buffer.
        iteration: Iteration of the shards.
        package: What it consists of.

    Raises:
        SpaceError: No space for it.
        OSError: It cannot be made.
    """

    def __init__(self, job_dir: str, iteration: int, package: Package) -> None:
        self._job_dir, self._iteration, self.package = job_dir, iteration, package
        self._layout = _Layout(package)
        self._stack = contextlib.ExitStack()
        self._fds: list[int] = []
        self._parts: list[str] = []
        self._texts = [bytearray(shard.manifest_bytes) for shard in package.shards]
        try:
            for name in ("slots", "manifests"):
                os.makedirs(os.path.join(job_dir, name), mode=0o700, exist_ok=True)
            for shard in package.shards:
                self._make(shard)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _make(self, shard: Shard) -> None:
        path = os.path.join(self._job_dir, "slots", f".rebuild-{shard.slot}.part")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a mover that was killed
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._stack.callback(os.close, fd)
        self._stack.callback(_remove, path)
        self._fds.append(fd)
        self._parts.append(path)
        make_room(fd, shard.file_bytes, path)

    def write(self, at: int, data: Bytes) -> None:
        """Write bytes of the stream.

        Raises:
            OSError: The file system refused.
        """
        done, view = 0, data.data
        for index, offset, skip, size in self._layout.pieces(at, data.size):
            part = view[done : done + size]
            if offset < 0:
                self._texts[index][skip : skip + size] = part
            else:
                pwrite_all(self._fds[index], part, offset + skip)
            done += size

    def write_slot(self, rank: int, at: int, data: Bytes) -> None:
        """Write bytes of the slot of a rank.

        Raises:
            OSError: The file system refused.
        """
        index = next(i for i, shard in enumerate(self.package.shards) if shard.rank == rank)
        pwrite_all(self._fds[index], data.data, at)

    def drafts(self) -> Iterator[tuple[Shard, ShardManifest, str]]:
        """Shards with their manifests and the files that are going to be their slots.

        Raises:
            DataError: A manifest is not what it was.
        """
        for shard, text, part in zip(self.package.shards, self._texts, self._parts, strict=True):
            where = f"the rebuilt manifest of rank {shard.rank}"
            manifest = ShardManifest.from_bytes(bytes(text), where=where)
            found = (manifest.iteration, manifest.rank, manifest.slot, manifest.generation)
            if found != (self._iteration, shard.rank, shard.slot, shard.generation):
                raise DataError(f"{where} is of another shard", fault="swapped")
            yield shard, manifest, part

    def publish(self) -> None:
        """Put the slots in their places, then the manifests.

        Raises:
            OSError: The file system refused.
        """
        for shard, text, part in zip(self.package.shards, self._texts, self._parts, strict=True):
            os.replace(part, os.path.join(self._job_dir, "slots", shard.slot))
            path = paths.manifest(self._job_dir, self._iteration, shard.rank)
            fsio.write_atomic(path, bytes(text), mode=0o600, sync=False)


class Chunk:
    """A chunk of a package as a source.

    Args:
        reader: Reads the package.
        start: First byte of the chunk in the package.
    """

    def __init__(self, reader: PackageReader, start: int) -> None:
        self._reader, self._start = reader, start

    def read(self, at: int, buffer: Bytes) -> Bytes:
        """See Source."""
        return self._reader.read(self._start + at, buffer)


class HashedChunk(Chunk):
    """A chunk that is hashed block by block, as it is read from its first byte to its last."""

    def __init__(self, reader: PackageReader, start: int) -> None:
        super().__init__(reader, start)
        self._hash = blocks.ItemHash(BLOCK_BYTES)

    def read(self, at: int, buffer: Bytes) -> Bytes:
        """See Source."""
        data = super().read(at, buffer)
        self._hash.update(data.data)
        return data

    def blocks(self) -> tuple[str, ...]:
        """Hashes of the blocks, once all of it was read."""
        return self._hash.finish()[1]


class ChunkSink:
    """A chunk of a package as a sink: hashes what is written."""

    def __init__(self, writer: PackageWriter, start: int) -> None:
        self._writer, self._start = writer, start
        self._hash = blocks.ItemHash(BLOCK_BYTES)

    def write(self, at: int, data: Bytes) -> None:
        """See Sink."""
        self._hash.update(data.data)
        self._writer.write(self._start + at, data)

    def blocks(self) -> tuple[str, ...]:
        """Hashes of the blocks, once all of it was written."""
        return self._hash.finish()[1]


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def pwrite_all(fd: int, view: memoryview, at: int) -> None:
    """Write a whole buffer at a place of a file.

    Raises:
        OSError: The file system refused.
    """
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


def make_room(fd: int, nbytes: int, path: str) -> None:
    """Give a file its size, if there is the space for it; who writes it finds out if that is taken meanwhile.

    Raises:
        SpaceError: There is not so much.
    """
    space = os.statvfs(os.path.dirname(path))
    free = space.f_bavail * space.f_frsize
    needed = nbytes - os.fstat(fd).st_blocks * 512
    if free < needed:
        raise SpaceError(
            f"no space for {path}: {needed} bytes are needed, {free} are free",
            mend="use a larger burst buffer, larger sets ([redundancy] set_size) or fewer slots (SLURM_RESIL_SLOTS)",
            path=path,
        )
    os.truncate(fd, nbytes)
