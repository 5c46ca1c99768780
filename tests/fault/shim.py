"""The library of shim.c: built once, preloaded into the processes of a campaign, told what to do from Python."""

from __future__ import annotations

import ctypes
import enum
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")


class Action(enum.IntEnum):
    """What is done at the n-th call; the numbers are those of shim.c."""

    COUNT = 0
    KILL_BEFORE = 1
    KILL_AFTER = 2
    FAIL = 3
    SHORT = 4


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        nth: Call, from 1.
        action: What is done there.
        error: Number of the error, of those that fail.
        for_good: Whether all calls after it fail too.
    """

    nth: int
    action: Action
    error: int = 0
    for_good: bool = False


def build(directory: Path) -> str:
    """Compile; returns the path for ``LD_PRELOAD``."""
    target = directory / "shim.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror"]
    with tempfile.NamedTemporaryFile(dir=directory, suffix=".so") as made:
        subprocess.run([*command, "-o", made.name, str(SOURCE), "-ldl"], check=True)
        os.link(made.name, target)
    return str(target)


class Shim:
    """The library in a process that was started with it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.shim_arm.argtypes = [ctypes.c_char_p, *[ctypes.c_int] * 4]
        self._library.shim_names.restype = ctypes.c_char_p

    def arm(self, directory: str, fault: Fault | None = None) -> None:
        """Begin to count the calls on files below a directory."""
        fault = fault or Fault(0, Action.COUNT)
        self._library.shim_arm(os.fsencode(directory), fault.nth, int(fault.action), fault.error, int(fault.for_good))

    def disarm(self) -> list[str]:
        """Stop; returns the names of the calls that were counted."""
        self._library.shim_disarm()
        return self.calls()

    def calls(self) -> list[str]:
        """The names of the calls that were counted so far."""
        return self._library.shim_names().decode().split()
