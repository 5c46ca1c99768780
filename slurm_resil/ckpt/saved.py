"""Checkpoints in a directory of the user's: each save has a directory of its own in it, and nothing is overwritten.

``<root>/<kind>-<iteration>-<token>-<world size>/`` holds ``slots/`` and ``manifests/`` as a job's directory in the
burst buffer does. A save counts once it is complete: all ranks' manifests are there, and for those of
torch.distributed.checkpoint its record, which is published last. Tokens rise: the newest is what was saved last.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slurm_resil.ckpt import seal
from slurm_resil.core import faults, fsio, paths
from slurm_resil.core.errors import DataError, SpaceError, UsageError
from slurm_resil.core.model import RunInfo
from slurm_resil.format import container, layout
from slurm_resil.format import stamp as stamps
from slurm_resil.format.manifest import Item, ShardManifest

Kind = Literal["save", "dcp"]
RECORD = "dcp.json"  # of a save of torch.distributed.checkpoint
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_NAME = re.compile(r"^(save|dcp)-(\d{10,19})-([0-9a-f]{16})-([1-9]\d{0,9})$")
_GONE = ".gone-"
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save in a directory, complete or not.

    Attributes:
        root: The user's directory.
        kind: ``save`` (of this package) or ``dcp`` (of torch.distributed.checkpoint).
        iteration: Its number.
        token: 16 hexadecimal digits; of two saves in a directory the later one has the larger token.
        world_size: Ranks that save.
    """

    root: str
    kind: Kind
    iteration: int
    token: str
    world_size: int

    @property
    def name(self) -> str:
        """Name of its directory; the run id of its shards too, so that a shard of another save is told apart."""
        return f"{self.kind}-{self.iteration:010d}-{self.token}-{self.world_size}"

    @property
    def path(self) -> str:
        """Its directory, in the layout of a job's directory."""
        return os.path.join(self.root, self.name)

    @property
    def record(self) -> str:
        """Record of torch.distributed.checkpoint."""
        return os.path.join(self.path, RECORD)

    @property
    def run(self) -> RunInfo:
        """What the stamps of its slots say."""
        job = os.environ.get("SLURM_JOB_ID", "")
        number = int(job) if job.isdecimal() else 0
        return RunInfo(run_id=self.name, job_id=number, attempt=0, cycle=0, world_size=self.world_size, nodes=1)

    def sealed(self) -> set[int]:
        """Ranks whose manifest is there, by the names alone."""
        found = set()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(os.path.join(self.path, "manifests")):
                parsed = paths.parse_manifest(name)
                if parsed is not None and parsed[0] == self.iteration:
                    found.add(parsed[1])
        return found

    @property
    def complete(self) -> bool:
        """Whether it counts."""
        if self.kind == "dcp":
            return os.path.exists(self.record)
        return self.sealed() >= set(range(self.world_size))

    def manifests(self) -> list[ShardManifest]:
        """Read the manifests of all ranks.

        Raises:
            DataError: One is missing, torn, renamed or of another save.
        """
        found = []
        for rank in range(self.world_size):
            path = paths.manifest(self.path, self.iteration, rank)
            try:
                manifest = ShardManifest.load(path)
            except FileNotFoundError as error:
                raise DataError(f"{path} is missing", fault="missing") from error
            if (manifest.iteration, manifest.rank, manifest.run_id) != (self.iteration, rank, self.name):
                text = f"{path} is swapped: it is of iteration {manifest.iteration}, rank {manifest.rank}"
                raise DataError(f"{text} of {manifest.run_id}", fault="swapped")
            found.append(manifest)
        return found

    def make(self) -> None:
        """Create its directories.

        Raises:
            UsageError: The root is a burst buffer directory of a job.
            OSError: The file system refused.
        """
        if os.path.exists(paths.run_info(self.root)) or os.path.exists(paths.control(self.root)):
            raise UsageError(f"{self.root} is a job's directory in the burst buffer", mend="save to another directory")
        for name in ("slots", "manifests"):
            os.makedirs(os.path.join(self.path, name), exist_ok=True)


def found(root: str) -> list[Save]:
    """All saves in a directory, complete or not, the newest first; by their names alone.

    Raises:
        OSError: The directory cannot be read; one that is not there has none.
    """
    saves = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(root):
            match = _NAME.match(name)
            if match:
                kind: Kind = "dcp" if match[1] == "dcp" else "save"
                saves.append(
                    Save(root=root, kind=kind, iteration=int(match[2]), token=match[3], world_size=int(match[4]))
                )
    return sorted(saves, key=lambda save: save.token, reverse=True)


def new(root: str, kind: Kind, world_size: int, *, iteration: int | None = None, after: Save | None = None) -> Save:
    """Name a new save.

    Args:
        root: The user's directory.
        kind: See Save.
        world_size: Ranks that save.
        iteration: Its number; default: one more than the largest that is there.
        after: Newest save there, if the caller knows; else the directory is read.

    Raises:
        OSError: The directory cannot be read.
    """
    there = [after] if after is not None else found(root)
    if iteration is None:
        iteration = max((save.iteration for save in there), default=0) + 1
    token = max([time.time_ns(), *(int(save.token, 16) + 1 for save in there)])
    return Save(root=root, kind=kind, iteration=iteration, token=f"{token:016x}", world_size=world_size)


def prune(root: str, kind: Kind, keep: int) -> list[Save]:
    """Remove what newer complete saves replace: never the newest ``keep`` complete ones, nor what is newer than them.

    Args:
        root: The user's directory.
        kind: Only saves of this kind.
        keep: Complete ones that stay, at least 1.

    Returns:
        What was removed.

    Raises:
        OSError: Something could not be removed.
    """
    saves = [save for save in found(root) if save.kind == kind]
    whole = [save for save in saves if save.complete]
    if not whole:
        return []
    kept = set(whole[: max(keep, 1)])
    gone = [save for save in saves if save not in kept and save.token < whole[0].token]
    with fsio.open_dir(root) as fd:
        for save in gone:
            with contextlib.suppress(FileNotFoundError):  # renamed first: half of a save is never seen
                os.rename(save.name, _GONE + save.name, src_dir_fd=fd, dst_dir_fd=fd)
        for name in os.listdir(fd):
            if name.startswith(_GONE):
                faults.point("saved.prune")
                fsio.rmtree_at(fd, name)
    return gone


def write_slot(
    save: Save, rank: int, specs: Sequence[container.Spec], read: Callable[[int], memoryview]
) -> tuple[str, int, tuple[int | None, ...]]:
    """Write a rank's slot of a save, complete with its stamp.

    Args:
        save: It.
        rank: Whose slot.
        specs: Datasets.
        read: Gives the bytes of the dataset with an index; asked for one after the other.

    Returns:
        Name of the slot, generation, and where each dataset's bytes begin.

    Raises:
        SpaceError: Storage is full or read-only.
        OSError: The file system refused otherwise.
    """
    path = paths.slot(save.path, rank, 0)
    temp = _temp(path)
    with refusals(save.root, sum(layout.nbytes(spec.dtype, spec.shape) for spec in specs)):
        try:
            skeleton = container.create_skeleton(
                temp,
                specs,
                attributes={"format": "slurm_resil slot", "version": 1, "rank": rank},
                user_block_bytes=container.USER_BLOCK_BYTES,
            )
            stamp = stamps.make(save.run, generation=int(save.token, 16), iteration=save.iteration, rank=rank)
            with open(temp, "r+b", buffering=0) as file:
                for index, offset in enumerate(skeleton.offsets):
                    if offset is not None:
                        faults.point("saved.write")
                        _pwrite(file.fileno(), read(index), offset)
                head = bytearray(stamps.BYTES)
                stamps.begin(head, stamp)
                stamps.end(head, stamp)
                _pwrite(file.fileno(), memoryview(head), 0)
            _publish(temp, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise
    return os.path.basename(path), stamp.generation, skeleton.offsets


def copy_slot(job_dir: str, manifest: ShardManifest, save: Save) -> ShardManifest:
    """Copy a sealed shard into a save, read it back, compare it with its hashes, and publish its manifest.

    Args:
        job_dir: Where the shard is; nobody writes its slot meanwhile.
        manifest: Its manifest, of the same save.
        save: Where it goes.

    Returns:
        The manifest that was published.

    Raises:
        SpaceError: Storage is full or read-only.
        DataError: What was written is not what was sealed.
        OSError: The file system refused otherwise.
    """
    path = paths.slot(save.path, manifest.rank, 0)
    temp = _temp(path)
    mine = replace(manifest, slot=os.path.basename(path))
    with refusals(save.root, manifest.nbytes):
        save.make()
        try:
            with seal.mapped(job_dir, manifest) as (data, _):
                fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    faults.point("saved.copy")
                    with memoryview(data) as view:
                        _pwrite(fd, view, 0)
                finally:
                    os.close(fd)
            _publish(temp, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise
        check(save, mine)
        faults.point("saved.publish")
        mine.publish(paths.manifest(save.path, mine.iteration, mine.rank), sync=True)
    return mine


def seal_slot(save: Save, manifest: ShardManifest) -> ShardManifest:
    """Hash a slot that was written into a save, publish its manifest, and read all back.

    Raises:
        SpaceError: Storage is full or read-only.
        DataError: What is read back is not what was written.
        OSError: The file system refused otherwise.
    """
    with refusals(save.root, manifest.nbytes):
        faults.point("saved.seal")
        sealed = seal.seal(save.path, manifest, sync=True)
        check(save, sealed)
    return sealed


def check(save: Save, manifest: ShardManifest) -> None:
    """Compare a slot with its hashes, from storage and not from the page cache, where the system can be told so.

    Raises:
        DataError: It is not what was sealed.
    """
    with open(seal.slot_path(save.path, manifest), "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    seal.verify(save.path, manifest)


def draft(
    save: Save, rank: int, items: tuple[Item, ...], values: object, slot: tuple[str, int], costs_s: dict[str, float]
) -> ShardManifest:
    """Manifest without hashes of a slot that :func:`write_slot` has written."""
    run = save.run
    return ShardManifest(
        run_id=run.run_id,
        job_id=run.job_id,
        attempt=run.attempt,
        iteration=save.iteration,
        rank=rank,
        world_size=save.world_size,
        node=os.uname().nodename,
        slot=slot[0],
        generation=slot[1],
        items=items,
        values=values,
        created_s=time.time(),
        costs_s=costs_s,
    )


@contextlib.contextmanager
def refusals(root: str, nbytes: int) -> Iterator[None]:
    """Turn what a full or read-only file system says into one kind of error, with what is there and what is needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        if error.errno == errno.EROFS:
            raise SpaceError(f"{root} is read-only", path=root) from error
        free = 0
        with contextlib.suppress(OSError):
            info = os.statvfs(root)
            free = info.f_bavail * info.f_frsize
        raise SpaceError(
            f"{root} has {free} bytes free, a shard of {nbytes} bytes did not fit ({error.strerror})",
            mend="free space or raise the quota there; what was complete is as it was",
            path=root,
        ) from error


def _temp(path: str) -> str:
    parent, name = os.path.split(path)
    return os.path.join(parent, f".{name}.{os.getpid()}.{os.urandom(4).hex()}.part")


def _publish(temp: str, path: str) -> None:
    fd = os.open(temp, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)  # also says what a delayed write has met
    finally:
        os.close(fd)
    os.replace(temp, path)
    fsio.fsync_dir(os.path.dirname(path))


def _pwrite(fd: int, view: memoryview | mmap.mmap, offset: int) -> None:
    data = memoryview(view).cast("B")
    while data:
        done = os.pwrite(fd, data[:_CHUNK_BYTES], offset)
        data, offset = data[done:], offset + done
