"""Pins: whoever reads the shards of an iteration keeps the agent from giving their slots away.

A pin is a shared lock (``flock``) on ``<job dir>/pins/<iteration>``; it ends with the process, however that ends. Take
it first, then read the manifests: a manifest that is there while the pin is held stays there.

A drained file is pinned by a shared lock on itself: retention leaves it alone as long as that is held. Where a file
system has no locks between hosts this keeps nobody; a file that is open can be read to its end all the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from slurm_resil.core import paths


def _open(job: str, iteration: int) -> int:
    path = paths.pin(job, iteration)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)


@contextlib.contextmanager
def hold(job: str, iteration: int) -> Iterator[None]:
    """Pin the shards of an iteration on this node; any number of holders.

    Blocks only for the moment in which the agent takes a manifest away.
    """
    while True:
        fd = _open(job, iteration)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.fstat(fd).st_nlink:  # else the agent removed the file between open and lock
                yield
                return
        finally:
            os.close(fd)


@contextlib.contextmanager
def exclude(job: str, iteration: int) -> Iterator[bool]:
    """For the agent: keep others from pinning; yields False if somebody holds a pin. Never blocks.

    The pin's file is removed at the end, unless it is held.
    """
    fd = _open(job, iteration)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
        with contextlib.suppress(FileNotFoundError):
            os.unlink(paths.pin(job, iteration))
    finally:
        os.close(fd)


def share(fd: int) -> None:
    """Pin the drained file that is open as ``fd``, until it is closed. Never blocks."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def shared(path: str) -> bool:
    """Whether somebody is known to have pinned a drained file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # gone, a link, or not writable: nobody can be asked
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
