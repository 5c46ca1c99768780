"""A file of parities that nobody needs any more, kept for the next encode.

Memory that a file has already needs not be cleared again, which costs more than writing it. Its bytes are never
believed: whoever takes it writes all of it. A reader that came before holds it, and then it is not taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat

ENDING = ".spare"


def retire(path: str) -> None:
    """Keep a file as the one spare of its directory, in place of one that was there.

    Raises:
        FileNotFoundError: It is gone already.
        OSError: The file system refused.
    """
    directory, name = os.path.split(path)
    before = _spares(directory)
    os.replace(path, os.path.join(directory, f".{name}{ENDING}"))
    for one in before:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, one))


def take(path: str) -> int | None:
    """Make a spare of the directory the file at a path that does not exist; returns its descriptor, None without one.

    It is this user's own, nobody reads it, and it has no other name; its size and its bytes are any.

    Raises:
        OSError: The file system refused.
    """
    directory = os.path.dirname(path)
    for name in _spares(directory):
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(directory, name), path)  # from here on it is ours alone
            fd = _own(path)
            if fd is not None:
                return fd
            os.unlink(path)
    return None


def hold(fd: int, path: str) -> bool:
    """Keep a file that is open for reading from being taken; whether it is still the one at the path."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        return False


def _own(path: str) -> int | None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and info.st_nlink == 1:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    os.close(fd)
    return None


def _spares(directory: str) -> list[str]:
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    return sorted(name for name in names if name.startswith(".") and name.endswith(f".bin{ENDING}"))
