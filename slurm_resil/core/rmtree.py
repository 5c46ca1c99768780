"""Remove a tree that another user can change meanwhile. Imports nothing that costs time: the epilog uses it."""

from __future__ import annotations

import os
import stat


def rmtree_at(dir_fd: int, name: str) -> None:
    """Remove the tree ``name`` below an open directory without following any link.

    Safe on trees that another user can change meanwhile: every level is opened relative to its parent with
    ``O_NOFOLLOW``. A missing ``name`` is fine.

    Raises:
        OSError: Something could not be removed.
    """
    try:
        info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(name, dir_fd=dir_fd)
            return
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    try:
        for entry in os.listdir(fd):
            rmtree_at(fd, entry)
    finally:
        os.close(fd)
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return
