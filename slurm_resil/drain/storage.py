"""The file below the page cache: reads that come from storage, and writing back while more is written."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os

import numpy as np

from slurm_resil.comm.base import Bytes
from slurm_resil.core import fsio
from slurm_resil.drain import hints
from slurm_resil.drain.ahead import PAGE_BYTES

PAST, NOT_PAST = "past the page cache", "not past the page cache"
# of these even a direct read may be answered from memory, or there is nothing but memory
_ALWAYS_CACHED = frozenset(("tmpfs", "ramfs", "rootfs", "zfs", "bcachefs"))
_WRITE_AND_WAIT = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE, _WAIT_AFTER
_MAP_BYTES = 1 << 30


class Reader:
    """A file that was written and synced by whoever, read from storage where the system can do that.

    Args:
        path: The file.
        past: Read past the page cache; False: through it, which says nothing about the storage.

    Attributes:
        size: Its size, bytes.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: str, *, past: bool = True) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct: int | None = None
        self._evicted = False
        self.size = os.fstat(self._fd).st_size
        if past and hints.file_system(path) not in _ALWAYS_CACHED:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            with contextlib.suppress(OSError):
                self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            self._evicted = True
        self._cached_bytes = 0

    def close(self) -> None:
        """Close it."""
        for fd in (self._fd, self._direct):
            if fd is not None:
                os.close(fd)
        self._direct = None

    @property
    def words(self) -> str:
        """What the reads until now came from: :data:`PAST` or :data:`NOT_PAST`."""
        return PAST if self._evicted and not self._cached_bytes else NOT_PAST

    def read(self, begin: int, end: int, out: Bytes) -> Bytes:
        """Read a range; ``begin`` is a multiple of the page size.

        Args:
            begin: First byte.
            end: Byte after the last one, at most the size.
            out: Buffer at the beginning of a page, large enough for ``end - begin`` rounded up to whole pages.

        Returns:
            The bytes, a view of ``out``.

        Raises:
            DataError: The file ends before.
            OSError: It cannot be read.
        """
        want = end - begin
        if self._direct is not None:
            got = self._read_direct(begin, -(-want // PAGE_BYTES) * PAGE_BYTES, out)
            if got >= want:
                return out[:want]
        self._cached_bytes += resident(self._fd, begin, end) if self._evicted else 0
        fsio.pread_into(self._fd, out[:want].data, begin, self._path)
        return out[:want]

    def forget(self, begin: int, end: int) -> None:
        """Drop a range from the page cache before :meth:`read_at` is used inside it, where the system can do that."""
        if self._evicted:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
            self._cached_bytes += resident(self._fd, begin, end)

    def read_at(self, offset: int, view: memoryview) -> None:
        """Read at any place, not directly.

        Raises:
            DataError: The file ends before.
            OSError: It cannot be read.
        """
        fsio.pread_into(self._fd, view, offset, self._path)

    def _read_direct(self, begin: int, size: int, out: Bytes) -> int:
        """Bytes that came; fewer at the end of the file, and none where the file system does not want to."""
        assert self._direct is not None
        at, view = 0, out.data
        while at < size:
            try:
                done = os.preadv(self._direct, [view[at:size]], begin + at)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.close(self._direct)
                self._direct = None
                return 0
            at += done
            if done == 0 or done % PAGE_BYTES:
                break
        return at


def resident(fd: int, begin: int, end: int) -> int:
    """Bytes of a range of a file that are in the page cache, in whole pages; all of them if that is not known."""
    page = mmap.PAGESIZE
    begin, found = begin // page * page, 0
    while begin < end:
        size = min(end - begin, _MAP_BYTES)
        pages = -(-size // page)
        seen = np.empty(pages, np.uint8)
        try:
            with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin) as mapped:
                whole = np.frombuffer(mapped, np.uint8)
                code = _libc().mincore(
                    ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(seen.ctypes.data)
                )
                del whole
        except (OSError, ValueError):  # cannot be mapped, or is shorter
            code = -1
        found += (pages if code else int(np.count_nonzero(seen & 1))) * page
        begin += size
    return found


def write_out(fd: int) -> None:
    """Write what a file has in memory to storage, and wait; where the file's structure is kept may still be in memory.

    So it does without the commit and the flush of the disk that ``fsync`` waits for, and hears of the same errors. What
    a crash of this host then takes is found missing when it is looked at.

    Raises:
        OSError: Storage refused.
    """
    if _libc().sync_file_range(ctypes.c_int(fd), ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_WRITE_AND_WAIT)):
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
            raise OSError(code, os.strerror(code))
        os.fsync(fd)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
