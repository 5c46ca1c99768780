"""Processes named for good: a pid alone may be another process's tomorrow, a pid with its start time may not."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from slurm_resil.core import fsio
from slurm_resil.core.errors import DataError, ServiceError
from slurm_resil.sandbox.ns import start_ticks

T = TypeVar("T")
_POLL_S = 0.02
_TELLING = re.compile("error|fatal|insecure|denied", re.IGNORECASE)
# what Slurm calls an error at each first start, or without PMIx
_NOISE = re.compile("pmix|state (save )?file|fed_mgr|MailProg|not recommended values", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Proc:
    """One process.

    Attributes:
        pid: In this process's PID namespace.
        start: Start time in clock ticks since boot.
    """

    pid: int
    start: int

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        try:
            return self.start > 0 and start_ticks(self.pid) == self.start
        except ProcessLookupError:
            return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, never to another process that got the same pid; fine if it is gone."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)

    def save(self, path: Path) -> None:
        """Record it."""
        fsio.write_json(path, asdict(self), sync=False)

    @classmethod
    def load(cls, path: Path) -> Proc | None:
        """Read a record; None if there is none or it is torn."""
        try:
            value = fsio.read_json(path, limit_bytes=4096)
            return cls(pid=int(value["pid"]), start=int(value["start"]))
        except (FileNotFoundError, NotADirectoryError, DataError, KeyError, TypeError, ValueError):
            return None

    @classmethod
    def of(cls, pid: int) -> Proc | None:
        """The process that has this pid now."""
        try:
            return cls(pid=pid, start=start_ticks(pid))
        except ProcessLookupError:
            return None


def wait_until(
    what: str, probe: Callable[[], T | None], *, timeout_s: float, poll_s: float = _POLL_S, on_timeout: str = ""
) -> T:
    """Poll until ``probe`` returns something true.

    Raises:
        ServiceError: It did not in time.
    """
    end = time.monotonic() + timeout_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() >= end:
            raise ServiceError(f"{what}: not within {timeout_s:g} s{on_timeout}")
        time.sleep(poll_s)


def wait_gone(procs: Iterable[Proc], *, timeout_s: float = 20.0) -> None:
    """Wait until none of the processes runs.

    Raises:
        ServiceError: One still does.
    """
    left = list(procs)
    names = ", ".join(str(proc.pid) for proc in left)
    wait_until(f"the end of process {names}", lambda: not any(proc.alive for proc in left), timeout_s=timeout_s)


def tail(path: Path, *, lines: int = 12, only_errors: bool = False) -> str:
    """The last lines of a log, or those that tell of an error; empty if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - (64 << 10)))
            text = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    if only_errors:
        text = [line for line in text if _TELLING.search(line) and not _NOISE.search(line)] or text
    return "\n".join(text[-lines:])
