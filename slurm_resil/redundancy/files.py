"""Files in the burst buffer that must be this user's own: no links, nothing of others."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError


def own_file(path: str, *, size: int | None = None) -> int:
    """Open a file for reading; returns the descriptor.

    Args:
        path: File.
        size: What its size must be, bytes; None for any.

    Raises:
        DataError: Missing, no plain file of this user, or of another size.
        OSError: It cannot be opened otherwise.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing", path=path, fault="missing") from error
    except OSError as error:
        if error.errno in fsio.UNREADABLE:
            raise DataError(f"cannot read {path}: {error.strerror}", path=path, fault="unreadable") from error
        raise
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise DataError(f"cannot read {path}: it is no file", path=path, fault="unreadable")
        if info.st_uid != os.geteuid():
            raise DataError(f"{path} belongs to uid {info.st_uid}, not to {os.geteuid()}", path=path, fault="foreign")
        if size is not None and info.st_size != size:
            raise DataError(f"{path} is truncated: {info.st_size} bytes, not {size}", path=path, fault="truncated")
    except BaseException:
        os.close(fd)
        raise
    return fd


def own_directory(job_dir: str, *, make: bool = False) -> str | None:
    """Directory of what this node holds for others; None if there is none.

    Raises:
        DataError: It is a link, no directory, or belongs to another user.
        OSError: It cannot be made.
    """
    path = paths.redundancy(job_dir)
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    try:
        with fsio.open_dir(path) as fd:
            uid = os.fstat(fd).st_uid
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise DataError(f"{path} is no directory of its own", mend="remove it", path=path, fault="foreign") from error
    if uid != os.geteuid():
        raise DataError(f"{path} belongs to uid {uid}, not to {os.geteuid()}", mend="remove it", path=path)
    return path
