"""The end of a sandbox, from its directory alone: whatever state a crash left it in, nothing of it stays."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from slurm_resil.core import fsio
from slurm_resil.core.errors import NotPermittedError, ResilError, TryAgainError, UsageError
from slurm_resil.sandbox.hosts import OF_ENV
from slurm_resil.sandbox.procs import Proc, wait_gone
from slurm_resil.sandbox.spec import Layout

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
    recorded = [Proc.load(file) for file in layout.procs.glob("*.json")] if layout.procs.is_dir() else []
    _kill_all(layout, [proc for proc in recorded if proc is not None and proc.alive])
    parent = layout.dir.parent
    try:
        with fsio.open_dir(parent) as fd:
            fsio.rmtree_at(fd, layout.dir.name)
    except OSError as error:
        raise ResilError(f"the sandbox {layout.dir} is stopped, but not all of it could be removed: {error}") from error


def _kill_all(layout: Layout, known: list[Proc]) -> None:
    """Kill what is known, what carries the sandbox's mark, and all their descendants."""
    for _ in range(20):
        found = {proc for proc in (*known, *_marked(layout)) if proc.alive}
        if not found:
            return
        found |= _descendants(found)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none forks while others die
            for proc in found:
                proc.kill(number)
        wait_gone(found)
        known = []


def _own_line() -> set[int]:
    """This process and its ancestors: a shell opened by ``exec`` that calls ``down`` must live to see it end."""
    line, pid = set(), os.getpid()
    while pid > 1 and pid not in line:
        line.add(pid)
        pid = _parent(pid)
    return line


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _marked(layout: Layout) -> set[Proc]:
    """Processes whose environment says that they are of this sandbox: daemons by our mark, jobs by Slurm's."""
    mark = f"{OF_ENV}={layout.dir}".encode()
    conf = f"SLURM_CONF={layout.slurm_conf}".encode()
    own = _own_line()
    found = set()
    for pid in _pids():
        if pid in own:
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                entries = file.read().split(b"\0")
        except OSError:
            continue
        if mark in entries or (conf in entries and any(entry.startswith(b"SLURM_JOB_ID=") for entry in entries)):
            proc = Proc.of(pid)
            if proc is not None:
                found.add(proc)
    return found


def _descendants(roots: set[Proc]) -> set[Proc]:
    own = _own_line()
    inside = {proc.pid for proc in roots}
    parents = {pid: _parent(pid) for pid in _pids()}
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in inside and pid not in inside and pid not in own}
        inside |= more
        grew = bool(more)
    found = (Proc.of(pid) for pid in inside)
    return {proc for proc in found if proc is not None}
