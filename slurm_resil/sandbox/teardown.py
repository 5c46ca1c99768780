"""The end of a sandbox, from its directory alone: whatever state a crash left it in, nothing of it stays."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from slurm_resil.core import fsio
from slurm_resil.core.errors import NotPermittedError, ResilError, TryAgainError, UsageError
from slurm_resil.sandbox.procs import Proc, wait_gone
from slurm_resil.sandbox.spec import Layout
from slurm_resil.sandbox.sweep import kill_matching, of_sandbox

_LOCK_TIMEOUT_S = 30.0


def is_sandbox(path: Path) -> bool:
    """Whether the directory is a sandbox's: the marker says so, whatever else is there."""
    try:
        return stat.S_ISREG(os.lstat(Layout(dir=path).marker).st_mode)
    except OSError:
        return False


@contextlib.contextmanager
def locked(layout: Layout, *, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the sandbox's lock, which a crash releases.

    Raises:
        TryAgainError: Somebody else holds it for too long.
        UsageError: There is no sandbox.
    """
    try:
        fd = os.open(layout.marker, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"there is no sandbox in {layout.dir}", path=layout.dir) from error
    try:
        end = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    raise TryAgainError(f"another command works on the sandbox {layout.dir}") from error
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def tear_down(path: Path) -> bool:
    """End the sandbox in this directory and remove the directory.

    Returns:
        Whether there was one.

    Raises:
        UsageError: The directory is not a sandbox's; it is left as it is.
        NotPermittedError: It is another user's.
        TryAgainError: It is being started or changed right now.
    """
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(info.st_mode):
        raise UsageError(f"{path} is not a directory", path=path)
    if not is_sandbox(path):
        if not os.listdir(path):
            os.rmdir(path)  # `up` was killed between making the directory and marking it
            return False
        raise UsageError(f"{path} is not a sandbox's directory: it has no {Layout(dir=path).marker.name}", path=path)
    if info.st_uid != os.geteuid():
        raise NotPermittedError(f"the sandbox {path} belongs to uid {info.st_uid}", path=path)
    layout = Layout(dir=path)
    with locked(layout):
        finish(layout)
    return True


def finish(layout: Layout) -> None:
    """Kill everything of a sandbox and remove its directory; the caller holds its lock.

    Raises:
        ResilError: Something survived or could not be removed.
    """
    keeper = Proc.load(layout.keeper)
    if keeper is not None and keeper.alive:
        keeper.kill()  # pid 1: the kernel kills the rest, and it is gone only when they are
        wait_gone([keeper])
    recorded = (Proc.load(file) for file in layout.procs.glob("*.json"))
    kill_matching(of_sandbox(layout), also=[proc for proc in recorded if proc is not None])
    parent = layout.dir.parent
    try:
        with fsio.open_dir(parent) as fd:
            fsio.rmtree_at(fd, layout.dir.name)
    except OSError as error:
        raise ResilError(f"the sandbox {layout.dir} is stopped, but not all of it could be removed: {error}") from error
