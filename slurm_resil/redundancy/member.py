"""What a member of a set holds: its manifest, and the parities beside it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from slurm_resil.comm.base import Bytes
from slurm_resil.core import fsio, paths, spare
from slurm_resil.core.errors import DataError, ResilError, TryAgainError
from slurm_resil.format import blocks
from slurm_resil.format.manifest import BLOCK_BYTES, Document, digest
from slurm_resil.redundancy.files import own_directory, own_file
from slurm_resil.redundancy.flow import Source
from slurm_resil.redundancy.geometry import Geometry
from slurm_resil.redundancy.package import Package, make_room, pwrite_all

KEPT = 2  # encodes that came to their end and are kept


@dataclass(frozen=True, kw_only=True)
class Parity:
    """A parity, or a copy.

    Attributes:
        stripe: Stripe that it is of.
        row: Which of the stripe's parities.
        offset: Its first byte in the file.
        nbytes: Size.
        blocks: Hashes of its blocks of ``BLOCK_BYTES``.
    """

    stripe: int
    row: int
    offset: int
    nbytes: int
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MemberManifest(Document):
    """A node's part of an encode.

    Attributes:
        token: Name of the encode, the same on all nodes and for no other encode.
        node_rank: Place of this member.
        scheme: As it was asked for, ``xor``.
        kind: ``partner``, ``xor`` or ``rs``.
        losses: Nodes that the set may lose; less than the scheme's if the set is too small for it.
        members: Packages of all members of the set, in its order, this one's among them.
        parities: What is in the file of parities.
        places: Number of places (node_ranks) of the run.
    """

    token: str
    run_id: str
    job_id: int
    attempt: int
    iteration: int
    world_size: int
    places: int
    node_rank: int
    scheme: str
    kind: str
    losses: int
    block_bytes: int
    members: tuple[Package, ...]
    parities: tuple[Parity, ...]
    created_s: float = 0.0

    @property
    def geometry(self) -> Geometry:
        """Of the set."""
        return Geometry(kind=self.kind, members=len(self.members), losses=self.losses)

    @property
    def index(self) -> int:
        """Which member of the set this one is."""
        return next(i for i, package in enumerate(self.members) if package.node_rank == self.node_rank)

    @property
    def file_bytes(self) -> int:
        """Size of the file of parities."""
        return sum(parity.nbytes for parity in self.parities)

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Self:
        members = tuple(Package.from_raw(entry) for entry in raw["members"])
        parities = tuple(Parity(**{**entry, "blocks": tuple(entry["blocks"])}) for entry in raw["parities"])
        manifest = cls(**{**raw, "members": members, "parities": parities})
        places = [package.node_rank for package in members]
        if len(set(places)) != len(places) or manifest.node_rank not in places:
            raise ValueError(f"place {manifest.node_rank} is not one of the set's places {places}")
        if manifest.block_bytes != BLOCK_BYTES:
            raise ValueError(f"blocks of {manifest.block_bytes} bytes")
        laid_out = layout(manifest.geometry, manifest.index, [package.nbytes for package in members])
        if [(p.stripe, p.row, p.offset, p.nbytes) for p in parities] != [
            (p.stripe, p.row, p.offset, p.nbytes) for p in laid_out
        ]:
            raise ValueError("the parities are not those of the set")
        for package in members:
            for column, hashes in enumerate(package.blocks):
                start, stop = manifest.geometry.chunk(package.nbytes, column)
                _count(hashes, stop - start)
            if len(package.blocks) != manifest.geometry.chunks:
                raise ValueError(f"{package.where} have {len(package.blocks)} chunks")
        for parity in parities:
            _count(parity.blocks, parity.nbytes)
        return manifest


def _count(hashes: Sequence[str], nbytes: int) -> None:
    if len(hashes) != -(-nbytes // BLOCK_BYTES):
        raise ValueError(f"{len(hashes)} hashes of blocks for {nbytes} bytes")


def layout(geometry: Geometry, member: int, sizes: Sequence[int]) -> tuple[Parity, ...]:
    """Lay out the parities of a member, without their hashes; ``sizes`` are those of the members' packages."""
    packages = dict(enumerate(sizes))
    result: list[Parity] = []
    at = 0
    for stripe, row in geometry.held(member):
        nbytes = geometry.parity_bytes(packages, stripe)
        result.append(Parity(stripe=stripe, row=row, offset=at, nbytes=nbytes))
        at += nbytes
    return tuple(result)


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """Keep others from making the same parities: an encode and a rebuild would put theirs in each other's place.

    Raises:
        TryAgainError: Somebody is at it.
        OSError: The lock cannot be made.
    """
    directory, name = os.path.split(path)
    lock = os.path.join(directory, f".{name.removesuffix('.bin')}.lock")
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TryAgainError(f"another mover makes {path}", mend="wait for it, then try again") from error
            if os.fstat(fd).st_nlink == 0:
                continue  # its holder has removed it a moment ago
            try:
                yield
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(lock)
            return
        finally:
            os.close(fd)


class ParityWriter:
    """Makes the file of parities, beside its place. Use as a context manager: what is not published is removed.

    Args:
        job_dir: Job's directory in the burst buffer.
        iteration: Iteration that is protected.
        node_rank: Place of this node.
        parities: What is to be in it.

    Raises:
        DataError: The directory is not this user's own.
        TryAgainError: Another mover makes the one of the same iteration and place.
        SpaceError: No space for it.
        OSError: It cannot be made.
    """

    def __init__(self, job_dir: str, iteration: int, node_rank: int, parities: Sequence[Parity]) -> None:
        own_directory(job_dir, make=True)
        self._path = paths.parity(job_dir, iteration, node_rank)
        self._locked = contextlib.ExitStack()
        self._locked.enter_context(_alone(self._path))
        try:
            self._open(parities)
        except BaseException:
            self._locked.close()
            raise

    def _open(self, parities: Sequence[Parity]) -> None:
        self._part = os.path.join(os.path.dirname(self._path), f".{os.path.basename(self._path)}.part")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._part)  # of a mover that was killed
        taken = spare.take(self._part)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._part, flags, 0o600) if taken is None else taken
        try:
            make_room(self._fd, sum(parity.nbytes for parity in parities), self._part)
        except BaseException:
            self._discard()
            raise
        self.sinks = {(p.stripe, p.row): ParitySink(self._fd, p) for p in parities}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close; remove what was not published. What goes with it must be published by then, too."""
        self._discard()
        self._locked.close()

    def _discard(self) -> None:
        os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._part)

    def publish(self) -> None:
        """Put the file in its place."""
        os.replace(self._part, self._path)

    def parities(self) -> tuple[Parity, ...]:
        """What is in it, with hashes, once all was written."""
        return tuple(sink.finish() for sink in self.sinks.values())


class ParitySink:
    """A parity as a sink: hashes what is written, block by block."""

    def __init__(self, fd: int, parity: Parity) -> None:
        self._fd, self._parity = fd, parity
        self._hash = blocks.ItemHash(BLOCK_BYTES)

    def write(self, at: int, data: Bytes) -> None:
        """See Sink."""
        self._hash.update(data.data)
        pwrite_all(self._fd, data.data, self._parity.offset + at)

    def finish(self) -> Parity:
        """It, with its hashes."""
        return Parity(**{**vars(self._parity), "blocks": self._hash.finish()[1]})


class ParityReader:
    """Reads the parities of this node. Use as a context manager.

    Raises:
        DataError: The file is missing, of another size, or not this user's own.
    """

    def __init__(self, job_dir: str, manifest: MemberManifest) -> None:
        self.manifest = manifest
        self.path = paths.parity(job_dir, manifest.iteration, manifest.node_rank)
        self._fd = own_file(self.path, size=manifest.file_bytes)
        if not spare.hold(self._fd, self.path):
            os.close(self._fd)
            raise DataError(f"{self.path} is missing: it was removed a moment ago", path=self.path, fault="missing")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def source(self, parity: Parity) -> ParitySource:
        """One of the parities, as a source."""
        return ParitySource(self._fd, parity, self.path)


class ParitySource:
    """A parity as a source."""

    def __init__(self, fd: int, parity: Parity, path: str) -> None:
        self._fd, self._parity, self._path = fd, parity, path

    def read(self, at: int, buffer: Bytes) -> Bytes:
        """See Source."""
        fsio.pread_into(self._fd, buffer.data, self._parity.offset + at, self._path)
        return buffer


def check_blocks(source: Source, nbytes: int, hashes: Sequence[str], buffer: Bytes) -> int | None:
    """Read a stream and compare its blocks with their hashes; returns the first that differs, None if none does.

    Raises:
        DataError: It ends too early.
        OSError: It cannot be read.
    """
    for index, expected in enumerate(hashes):
        part = source.read(index * BLOCK_BYTES, buffer[: min(BLOCK_BYTES, nbytes - index * BLOCK_BYTES)])
        if digest(part) != expected:
            return index
    return None


def found(job_dir: str) -> Iterator[tuple[int, MemberManifest | str]]:
    """Every manifest that this node holds: its iteration by its name, and it, or what is wrong with it.

    Raises:
        DataError: The directory is not this user's own.
        OSError: It cannot be read.
    """
    directory = own_directory(job_dir)
    for name in sorted(os.listdir(directory) if directory else ()):
        parsed = paths.parse_member(name)
        if parsed is None or parsed[2] != "json":
            continue
        assert directory is not None
        path = os.path.join(directory, name)
        try:
            os.close(own_file(path))
            manifest = MemberManifest.load(path)
            if (manifest.iteration, manifest.node_rank) != parsed[:2]:
                raise DataError(f"{path} is of iteration {manifest.iteration}, place {manifest.node_rank}")
        except FileNotFoundError:
            continue
        except ResilError as error:
            if error.context.get("fault") != "missing":  # removed a moment ago
                yield parsed[0], error.message
        else:
            yield parsed[0], manifest


def listed(job_dir: str) -> tuple[list[MemberManifest], list[str]]:
    """Manifests that this node holds, newest iteration first, and what is wrong with others.

    Raises:
        OSError: The directory cannot be read.
    """
    try:
        all_of_them = [one for _, one in found(job_dir)]
    except DataError as error:
        return [], [error.message]
    good = [one for one in all_of_them if isinstance(one, MemberManifest)]
    bad = [one for one in all_of_them if isinstance(one, str)]
    return sorted(good, key=lambda one: (-one.iteration, -one.created_s)), bad


def prune(job_dir: str, keep: Sequence[int], whole: Sequence[int]) -> None:
    """Remove what protects nothing any more.

    Args:
        job_dir: Job's directory in the burst buffer.
        keep: Iterations that stay whatever is there of them.
        whole: Iterations that came to their end, newest first; the first ``KEPT`` stay.

    Raises:
        OSError: The file system refused.
    """
    directory = own_directory(job_dir)
    if directory is None:
        return
    stay = {*keep, *list(dict.fromkeys(whole))[:KEPT]}
    names = [(parsed, name) for name in os.listdir(directory) if (parsed := paths.parse_member(name))]
    for (iteration, _, _), name in sorted(names, key=lambda pair: pair[0][2] != "json"):  # manifests go first
        if iteration not in stay:
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path) if name.endswith(".json") else spare.retire(path)
