"""Remove a tree that another user can change meanwhile. Imports nothing that costs time: the epilog uses it."""

from __future__ import annotations

import os
import stat

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def rmtree_at(dir_fd: int, name: str) -> None:
    """Remove the tree ``name`` below an open directory without following any link.

    Safe on trees that another user can change meanwhile, and of any depth: every level is opened relative to its
    parent with ``O_NOFOLLOW``, and a directory that is in a directory is moved up beside it before it is gone through,
    so that few are open at a time. A missing ``name`` is fine.

    Raises:
        OSError: Something could not be removed.
    """
    if not _is_dir(dir_fd, name):
        return
    top = os.open(name, _FLAGS, dir_fd=dir_fd)
    moved = 0
    try:
        waiting = os.listdir(top)
        while waiting:
            entry = waiting.pop()
            if not _is_dir(top, entry):
                continue
            try:
                fd = os.open(entry, _FLAGS, dir_fd=top)
            except FileNotFoundError:
                continue
            try:
                for inner in os.listdir(fd):
                    if _is_dir(fd, inner):
                        moved += 1
                        aside = f".rm-{os.getpid()}-{moved}"
                        os.rename(inner, aside, src_dir_fd=fd, dst_dir_fd=top)
                        waiting.append(aside)
            finally:
                os.close(fd)
            _rmdir(top, entry)
    finally:
        os.close(top)
    _rmdir(dir_fd, name)


def _is_dir(dir_fd: int, name: str) -> bool:
    """Whether it is a directory; anything else is removed."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            return True
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        pass
    return False


def _rmdir(dir_fd: int, name: str) -> None:
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return
