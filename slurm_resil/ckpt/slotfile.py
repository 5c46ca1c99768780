"""Slot files: laid out once, with every page in place, and used again by whoever wants the same layout.

No torch here: the agent lays slots out ahead of the first saves, and a process that starts again takes over what the
one before has left. Beside each slot lies what is known of its layout, so that nobody has to ask HDF5.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import CapacityError, ConfigError, DataError, SpaceError, missing_path
from slurm_resil.format import container, frame, layout
from slurm_resil.format.manifest import Document, digest

LEAST_SLOTS = 2  # one holds the newest that is sealed, one is written
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_STRUCTURE_BYTES = 1024  # more than HDF5 needs to describe one dataset, names included
_HUGE = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A layout that a rank wants of its slots.

    Attributes:
        rank: Global rank.
        specs: The datasets.
        reserve_bytes: What all parities on this node may take: slots that are a help only leave it free.
    """

    rank: int
    specs: tuple[container.Spec, ...]
    reserve_bytes: int = 0

    def _data(self, **more: int) -> bytes:
        specs = [[spec.path, spec.dtype, spec.shape, spec.attributes] for spec in self.specs]
        return json.dumps({"rank": self.rank, "specs": specs, **more}, separators=(",", ":"), allow_nan=False).encode()

    @cached_property
    def digest(self) -> str:
        """Name of this layout: equal ones lay files out equally."""
        return digest(self._data())

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all datasets."""
        return sum(layout.nbytes(spec.dtype, spec.shape) for spec in self.specs)

    @cached_property
    def file_bytes(self) -> int:
        """Upper bound of a slot's size."""
        align = layout.ALIGNMENT_BYTES
        data = sum(-(-layout.nbytes(spec.dtype, spec.shape) // align) * align for spec in self.specs)
        names = sum(len(spec.path.encode()) for spec in self.specs)
        return data + container.USER_BLOCK_BYTES + _STRUCTURE_BYTES * (len(self.specs) + 8) + names

    def publish(self, job_dir: str) -> None:
        """Write it where the agent finds it.

        Raises:
            SpaceError: The burst buffer is full or read-only.
            ConfigError: There is no burst buffer.
        """
        with _refusals(job_dir, self):
            _make_directories(job_dir)
            data = self._data(reserve_bytes=self.reserve_bytes)
            fsio.write_atomic(_wanted_path(job_dir, self.rank), data, mode=0o600, sync=False)

    @classmethod
    def read(cls, job_dir: str, rank: int) -> Wanted:
        """Read what a rank has published.

        Raises:
            DataError: Nothing, or nothing of this kind.
        """
        path = _wanted_path(job_dir, rank)
        try:
            raw = fsio.read_json(path)
            specs = tuple(
                container.Spec(path=name, dtype=dtype, shape=tuple(shape), attributes=attributes)
                for name, dtype, shape, attributes in raw["specs"]
            )
            return cls(rank=raw["rank"], specs=specs, reserve_bytes=raw["reserve_bytes"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path} is no layout of slots: {error!r}", path=path) from error


@dataclass(frozen=True, kw_only=True)
class Laid(Document):
    """How a slot is laid out.

    Attributes:
        wanted: Digest of the layout.
        file_bytes: Size of the file.
        offsets: First byte of each dataset, None for empty ones.
        frame: Hash of all that is neither data nor stamp, see :mod:`slurm_resil.format.frame`.
    """

    wanted: str
    file_bytes: int
    offsets: tuple[int | None, ...]
    frame: str

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Laid:
        return cls(**{**raw, "offsets": tuple(raw["offsets"])})


class SlotFiles:
    """Slot files of one rank.

    Args:
        job_dir: Job's directory in the burst buffer; created if only the last part is missing.
        rank: Global rank.
        count: Number of slots.
    """

    def __init__(self, job_dir: str, rank: int, count: int) -> None:
        self._job_dir, self._rank, self._count = job_dir, rank, count

    def path(self, index: int) -> str:
        """Path of a slot."""
        return paths.slot(self._job_dir, self._rank, index)

    def open(self, index: int, wanted: Wanted) -> tuple[Laid, mmap.mmap]:
        """Map a slot that has the wanted layout; it is laid out if it has another one, or is damaged.

        Args:
            index: A slot that holds nothing of worth.
            wanted: Layout.

        Returns:
            Its layout, and the file mapped for writing, every page in place.

        Raises:
            SpaceError: The burst buffer is full, too small or read-only; names path and both sizes.
            ConfigError: There is no burst buffer.
            OSError: The file system refused otherwise.
        """
        return self._adopt(index, wanted) or self.create(index, wanted)

    def fits(self, index: int, wanted: Wanted) -> bool:
        """Whether a slot's file is there and claims to have a layout."""
        laid = self._laid(index)
        with contextlib.suppress(OSError):
            size = os.stat(self.path(index), follow_symlinks=False).st_size
            return laid is not None and (laid.wanted, laid.file_bytes) == (wanted.digest, size)
        return False

    def create(self, index: int, wanted: Wanted) -> tuple[Laid, mmap.mmap]:
        """Lay a slot out anew, see :meth:`open`."""
        path = self.path(index)
        temp = f"{path}.tmp"
        with _refusals(self._job_dir, wanted, self):
            _make_directories(self._job_dir)
            self._check_space(index, wanted)
            for name in (path, temp):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
            map_: mmap.mmap | None = None
            try:
                laid, map_ = self._like_another(index, wanted, temp) or _new(temp, wanted)
                fsio.write_atomic(self._laid_path(index), laid.to_bytes(), mode=0o600, sync=False)
                os.replace(temp, path)
            except BaseException:
                if map_ is not None:
                    map_.close()
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temp)
                raise
        return laid, map_

    def _like_another(self, index: int, wanted: Wanted, path: str) -> tuple[Laid, mmap.mmap] | None:
        """Lay a file out as another slot is, without HDF5, which takes seconds for many thousands of datasets."""
        like = next((one for one in range(self._count) if one != index and self.fits(one, wanted)), None)
        laid = self._laid(like) if like is not None else None
        if like is None or laid is None:
            return None
        fd = os.open(self.path(like), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file, mmap.mmap(fd, laid.file_bytes, access=mmap.ACCESS_READ) as other:
            if os.fstat(file.fileno()).st_size != laid.file_bytes:
                return None
            spans = list(_spans(wanted.specs, laid.offsets))
            if frame.digest(lambda start, stop: other[start:stop], spans, len(other)) != laid.frame:
                return None
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            os.truncate(path, laid.file_bytes)
            map_ = _in_place(path, laid.file_bytes)
            for start, stop in frame.gaps(spans, len(other)):
                map_[start:stop] = other[start:stop]
        return laid, map_

    def _adopt(self, index: int, wanted: Wanted) -> tuple[Laid, mmap.mmap] | None:
        if not self.fits(index, wanted) or (laid := self._laid(index)) is None:
            return None
        with contextlib.suppress(OSError):
            fd = os.open(self.path(index), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                info = os.fstat(fd)
                if info.st_size != laid.file_bytes or info.st_blocks * 512 < info.st_size:
                    return None  # a hole would be a SIGBUS when space is short
                map_ = mmap.mmap(fd, laid.file_bytes)
            finally:
                os.close(fd)
            _prefault(map_)
            spans = _spans(wanted.specs, laid.offsets)
            if frame.digest(lambda start, stop: map_[start:stop], spans, len(map_)) == laid.frame:
                return laid, map_
            map_.close()
        return None

    def _laid(self, index: int) -> Laid | None:
        with contextlib.suppress(OSError, DataError):
            return Laid.load(self._laid_path(index))
        return None

    def _laid_path(self, index: int) -> str:
        return paths.described(self._job_dir, f"layout-{os.path.basename(self.path(index))}")

    # space

    def made(self, wanted: Wanted) -> int:
        """How many slots have a layout already."""
        return sum(self.fits(index, wanted) for index in range(self._count))

    def _check_space(self, index: int, wanted: Wanted) -> None:
        """Refuse early when this slot does not fit, or fewer slots than it takes to save again and again.

        More than those are a help for drains that are slow: not worth refusing for, and parity goes before them.
        """
        others = [one for one in range(self._count) if one != index]
        fitting = {one for one in others if self.fits(one, wanted)}
        missing = min(LEAST_SLOTS, self._count) - len(fitting) - 1
        info = os.statvfs(self._job_dir)
        if not info.f_blocks:
            return
        free = info.f_bavail * info.f_frsize + self._held(index)
        least = wanted.file_bytes
        if len(fitting) >= LEAST_SLOTS:
            least += max(0, wanted.reserve_bytes - _parities(self._job_dir))
        if free < least:
            raise _too_small(self._job_dir, wanted, free, least, len(fitting))
        # what others of an earlier layout hold comes back when it is their turn
        free += sum(self._held(one) for one in others if one not in fitting)
        need = wanted.file_bytes * (1 + max(missing, 0))
        if free < need:
            raise _too_small(self._job_dir, wanted, free, need, len(fitting))

    def _held(self, index: int) -> int:
        """Bytes of a slot's file."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(self.path(index)).st_blocks * 512
        return 0


def capacity(job_dir: str) -> int:
    """Bytes of the file system that holds the job's directory, or will; 0 if that is not known."""
    place = job_dir
    while not os.path.isdir(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    info = os.statvfs(place)
    return info.f_blocks * info.f_frsize


def check_capacity(
    job_dir: str, wanted: Wanted, ranks_on_node: int, *, slots: int, parity_bytes: int = 0, scheme: str = ""
) -> str:
    """Refuse a burst buffer that could not hold the slots even if it were empty.

    Args:
        job_dir: Job's directory in the burst buffer.
        wanted: Layout of this rank's slots; the node's other ranks are taken to need as much.
        ranks_on_node: Number of ranks that share the burst buffer.
        slots: Slots that each rank is to have.
        parity_bytes: What parities may take on this node.
        scheme: What protects the checkpoints; empty: nothing does.

    Returns:
        What does not fit although training goes on without it, for people; empty if all does.

    Raises:
        CapacityError: It is too small; names both sizes.
    """
    size, one = capacity(job_dir), ranks_on_node * wanted.file_bytes
    need = LEAST_SLOTS * one
    if size and size < need:
        raise CapacityError(
            f"the burst buffer at {job_dir} is too small: it holds {size} bytes, {need} are needed for "
            f"{LEAST_SLOTS} slots of {ranks_on_node} ranks with a state of {wanted.nbytes} bytes",
            mend="use a larger burst buffer (SLURM_RESIL_BB_ROOT), or mount this one with a larger size",
            path=job_dir,
        )
    if not size or not parity_bytes or size >= slots * one + parity_bytes:
        return ""
    room = (size - parity_bytes) // one
    came_of_it = (
        f"{room} slots are made"
        if room >= LEAST_SLOTS
        else f"checkpoints are not protected: {LEAST_SLOTS} slots leave {size - need} bytes"
    )
    wish = slots * one + parity_bytes
    return (
        f"the burst buffer at {job_dir} holds {size} bytes, {wish} are needed for {slots} slots of "
        f"{ranks_on_node} ranks with a state of {wanted.nbytes} bytes, and {parity_bytes} of these for the parity of "
        f"{scheme}; {came_of_it}"
    )


def _parities(job_dir: str) -> int:
    """Bytes that parities take on this node now."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(paths.redundancy(job_dir)) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def _wanted_path(job_dir: str, rank: int) -> str:
    return paths.described(job_dir, f"wanted-{rank}")


def _spans(specs: Sequence[container.Spec], offsets: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    for spec, offset in zip(specs, offsets, strict=True):
        if offset is not None:
            yield offset, offset + layout.nbytes(spec.dtype, spec.shape)


def _new(path: str, wanted: Wanted) -> tuple[Laid, mmap.mmap]:
    skeleton = container.create_skeleton(
        path,
        wanted.specs,
        attributes={"format": "slurm_resil slot", "version": 1, "rank": wanted.rank},
        user_block_bytes=container.USER_BLOCK_BYTES,
    )
    map_ = _in_place(path, skeleton.file_bytes)
    spans = _spans(wanted.specs, skeleton.offsets)
    hash_ = frame.digest(lambda start, stop: map_[start:stop], spans, len(map_))
    return Laid(wanted=wanted.digest, file_bytes=len(map_), offsets=skeleton.offsets, frame=hash_), map_


def _in_place(path: str, size: int) -> mmap.mmap:
    """Map a file, every page in place."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _huge_pages():  # they are given at a fault in such a mapping, not by fallocate
            with mmap.mmap(fd, size) as map_, contextlib.suppress(OSError):
                map_.madvise(mmap.MADV_HUGEPAGE)
                map_.madvise(_POPULATE_WRITE)  # space that is short is an error here, not a SIGBUS
        # every byte has its place now: later the copy cannot run out of space, which would be a SIGBUS
        os.posix_fallocate(fd, 0, size)
        map_ = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    _prefault(map_)
    return map_


def _huge_pages() -> bool:
    """Whether a mapping in shared memory may ask for huge pages."""
    try:
        with open(_HUGE, encoding="ascii") as file:
            return "[advise]" in file.read()
    except OSError:
        return False


def _prefault(map_: mmap.mmap) -> None:
    """Touch every page for writing, so that the copies do not wait for the kernel to find them."""
    with contextlib.suppress(OSError):
        map_.madvise(mmap.MADV_HUGEPAGE)
    try:
        map_.madvise(_POPULATE_WRITE)
    except OSError:
        for at in range(0, len(map_), mmap.PAGESIZE):  # an older kernel
            map_[at] = map_[at]


def _make_directories(job_dir: str) -> None:
    root = os.path.dirname(job_dir.rstrip("/")) or "."
    if not os.path.isdir(root):
        raise missing_path(root, "the burst buffer", "create it on every node, or set SLURM_RESIL_BB_ROOT")
    for name in ("slots", "described"):
        os.makedirs(os.path.join(job_dir, name), mode=0o700, exist_ok=True)


def _too_small(job_dir: str, wanted: Wanted, free: int, need: int, made: int) -> SpaceError:
    what, goes_on = f"for a slot with a state of {wanted.nbytes} bytes", ""
    if made >= LEAST_SLOTS:
        what += f", with {need - wanted.file_bytes} for parity" if need > wanted.file_bytes else ""
        goes_on = f"; the next saves use the {made} slots that are there"
    elif need > wanted.file_bytes:
        what = f"for {LEAST_SLOTS} slots with a state of {wanted.nbytes} bytes"
    return SpaceError(
        f"the burst buffer at {job_dir} has {free} bytes for rank {wanted.rank}, {need} are needed {what}",
        mend=f"free space there, or use a larger burst buffer (SLURM_RESIL_BB_ROOT){goes_on}",
        path=job_dir,
    )


@contextlib.contextmanager
def _refusals(job_dir: str, wanted: Wanted, files: SlotFiles | None = None) -> Iterator[None]:
    """Turn what a full or read-only file system says into one kind of error."""
    try:
        yield
    except SpaceError:
        raise
    except OSError as error:
        if error.errno not in _FULL:
            if isinstance(error, NotADirectoryError | PermissionError):
                raise ConfigError(f"the burst buffer at {job_dir} cannot be used: {error}") from error
            raise
        if error.errno == errno.EROFS:
            raise SpaceError(f"the burst buffer at {job_dir} is read-only", path=job_dir) from error
        raise _refused(job_dir, wanted, files) from error


def _refused(job_dir: str, wanted: Wanted, files: SlotFiles | None) -> SpaceError:
    info = os.statvfs(os.path.dirname(job_dir.rstrip("/")) or ".")
    made = files.made(wanted) if files is not None else 0
    return _too_small(job_dir, wanted, info.f_bavail * info.f_frsize, wanted.file_bytes, made)
