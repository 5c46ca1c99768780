"""File operations that survive crashes (temp, fsync, rename, fsync the directory) and refuse links."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

from slurm_resil.core.errors import DataError
from slurm_resil.core.rmtree import rmtree_at as rmtree_at

StrPath = str | os.PathLike[str]


def fsync_dir(path: StrPath) -> None:
    """Make renames and creations in a directory survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: StrPath, data: bytes, *, mode: int = 0o644, sync: bool = True) -> None:
    """Publish ``data`` at ``path``: readers see the old content or the new one, never a mix.

    Args:
        path: Final name. Its directory must exist.
        data: Whole content, bytes.
        mode: Permission bits of the new file.
        sync: Also survive a power loss; without it the file survives the process only (enough on tmpfs).

    Raises:
        OSError: The file system refused; ``path`` is then as it was before, unless it was only the directory that could
            not be synced: then it has the new content, which may not survive a power loss.
    """
    path = os.fspath(path)
    parent, name = os.path.split(path)
    temp = os.path.join(parent, f".{name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            os.fchmod(fd, mode)  # whatever the umask
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
        raise
    if sync:
        fsync_dir(parent or ".")


def write_json(path: StrPath, value: Any, *, mode: int = 0o644, sync: bool = True) -> None:
    """Publish a JSON document at ``path``, see :func:`write_atomic`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    write_atomic(path, text.encode() + b"\n", mode=mode, sync=sync)


def read_bytes(path: StrPath, *, limit_bytes: int = 1 << 30) -> bytes:
    """Read a whole file.

    Raises:
        FileNotFoundError: There is none.
        DataError: It cannot be opened as a file of its own (no permission, a link, a pipe), or is larger than
            ``limit_bytes``.
        OSError: The file system failed.
    """
    with _open_plain(path) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise DataError(f"{path} is larger than {limit_bytes} bytes", path=path)
    return data


def read_json(path: StrPath, *, limit_bytes: int = 1 << 30) -> Any:
    """Read a JSON document.

    Raises:
        FileNotFoundError: There is none.
        DataError: See :func:`read_bytes`; or it is not JSON.
        OSError: The file system failed.
    """
    try:
        return json.loads(read_bytes(path, limit_bytes=limit_bytes))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}", path=path) from error


UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO)


def _open_plain(path: StrPath) -> BinaryIO:
    """Open for reading what is a file, without following a link and without waiting for a pipe's other end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in UNREADABLE:
            raise DataError(f"cannot read {path}: {error.strerror}", path=path, fault="unreadable") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DataError(f"cannot read {path}: it is no file", path=path, fault="unreadable")
    return open(fd, "rb")


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


def in_memory(fd: int) -> bool:
    """Whether an open file lies in memory, as in tmpfs: mapped pages can then always be read, up to its end."""
    device = os.fstat(fd).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            if before.split()[2] == name:
                return after.split()[0] in ("tmpfs", "ramfs", "devtmpfs")
    return False


@contextlib.contextmanager
def open_dir(path: StrPath, *, dir_fd: int | None = None) -> Iterator[int]:
    """Open a directory without following a link in its last part; yields the descriptor."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)
