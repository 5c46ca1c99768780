"""Low priority for the processor and the disk: training goes first."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading

NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "riscv64": 30}
_WHO_PROCESS = 1
_BEST_EFFORT, _LOWEST = 2, 7


def lower() -> None:
    """Lower this process; where the system refuses, nothing happens."""
    with contextlib.suppress(OSError):
        os.nice(max(0, NICE - os.nice(0)))
    _lower_disk()


def lower_thread() -> None:
    """Lower the calling thread alone; where the system refuses, nothing happens."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    _lower_disk()


def _lower_disk() -> None:
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(number, _WHO_PROCESS, 0, _BEST_EFFORT << 13 | _LOWEST)
