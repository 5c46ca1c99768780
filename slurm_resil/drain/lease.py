"""Lease on the drain of one iteration: a file beside the checkpoint, with its owner and a heartbeat.

HDF5's and POSIX locks are not to be relied on between hosts, so the lease is a file made with ``O_EXCL`` whose
modification time its owner moves on. Whoever finds one takes it over only when the owner is provably gone (same boot
of the same host and no such process) or when the time has stood still for ``STALE_S`` of the finder's own clock; clocks
of two hosts are never compared. An owner that was taken over finds out before it publishes, see :meth:`Lease.check`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from slurm_resil.comm.base import from_os_error
from slurm_resil.core.errors import TryAgainError

BEAT_S = 1.0
STALE_S = 8.0
_POLL_S = 0.25


def path(run_dir: str, iteration: int) -> str:
    """File of the lease."""
    return os.path.join(run_dir, f".ckpt-{iteration:010d}.lease")


class Lease:
    """A lease that is held; :meth:`release` it.

    Args:
        run_dir: Run's directory.
        iteration: Iteration that is drained.
        owner: Words about the owner for whoever meets the lease (``job``, ``step``).
        stop: Asked while waiting for a stale one.
        stale_s: Seconds without a heartbeat after which a lease is dead.

    Raises:
        TryAgainError: Somebody else holds it.
        ResilError: The directory cannot be written; names it and the mend.
    """

    def __init__(
        self,
        run_dir: str,
        iteration: int,
        *,
        owner: str = "",
        stop: Callable[[], bool] = lambda: False,
        stale_s: float = STALE_S,
    ) -> None:
        self._path = path(run_dir, iteration)
        self._iteration = iteration
        self._token = secrets.token_hex(8)
        self._body = json.dumps({"token": self._token, "owner": owner, **_identity()}, sort_keys=True).encode()
        try:
            while not self._create():
                self._take_over(stop, stale_s)
        except OSError as error:
            # the file's name would tell people nothing: it is the directory that they can do something about
            refused = OSError(error.errno, error.strerror)
            problem = from_os_error(refused, f"cannot drain iteration {iteration} into the run's directory {run_dir}")
            problem.mend = "make it writable for this user and see that there is space, then drain again"
            raise problem from error
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Make sure that the lease is still ours.

        Raises:
            TryAgainError: It was taken over.
        """
        seen = _look(self._path)
        if seen is None or seen[1].get("token") != self._token:
            raise TryAgainError(
                f"the drain of iteration {self._iteration} was taken over by {_name(seen[1]) if seen else 'somebody'}",
                mend="wait for that one",
                run_dir=os.path.dirname(self._path),
            )

    def release(self) -> None:
        """Give it back; a lease that was taken over is left alone."""
        self._quit.set()
        self._thread.join()
        with contextlib.suppress(TryAgainError, OSError):
            self.check()
            os.unlink(self._path)
        os.close(self._fd)

    def _create(self) -> bool:
        # complete before it has its name: nobody ever reads half a lease
        temp = f"{self._path}.{self._token}"
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, self._body)
            os.link(temp, self._path)
        except FileExistsError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        finally:
            os.unlink(temp)
        self._fd = fd
        return True

    def _take_over(self, stop: Callable[[], bool], stale_s: float) -> None:
        seen = _look(self._path)
        if seen is None:
            return
        beat, owner = seen
        since = time.monotonic()
        while not _gone(owner) and time.monotonic() - since < stale_s:
            time.sleep(_POLL_S)
            now = _look(self._path)
            if now is None:
                return
            if now[0] != beat or stop():
                raise TryAgainError(
                    f"iteration {self._iteration} is being drained by {_name(owner)}",
                    mend="wait for that drain, or end that process",
                    run_dir=os.path.dirname(self._path),
                )
        aside = f"{self._path}.{self._token}.old"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, aside)
            moved = _look(aside)
            if moved is not None and moved[1].get("token") != owner.get("token"):
                with contextlib.suppress(FileExistsError):  # another finder was faster: give its lease back
                    os.link(aside, self._path)
            os.unlink(aside)

    def _beat(self) -> None:
        while not self._quit.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._fd)


def _look(where: str) -> tuple[tuple[int, int], dict[str, Any]] | None:
    """Heartbeat and owner; opens the file each time, so that network file systems ask the server."""
    try:
        fd = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        info = os.fstat(fd)
        try:
            body = json.loads(os.read(fd, 1 << 16))
        except ValueError:
            body = {}
    finally:
        os.close(fd)
    return (info.st_ino, info.st_mtime_ns), body if isinstance(body, dict) else {}


def _identity() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "boot": _boot(), "started": _started(pid)}


def _boot() -> str:
    """Boot of the host and its PID namespace: process numbers mean something only inside of both."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _gone(owner: dict[str, Any]) -> bool:
    here = _boot()
    if not here or owner.get("boot") != here or owner.get("host") != socket.gethostname():
        return False
    pid = owner.get("pid")
    return isinstance(pid, int) and bool(owner.get("started")) and _started(pid) != owner["started"]


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}" + (
        f" ({owner['owner']})" if owner.get("owner") else ""
    )
