"""Faults at named points, for tests: ``SLURM_RESIL_FAULT="point:action[,point:action...]"``.

Actions: ``kill`` (SIGKILL to this process), ``exit``, ``stop`` (SIGSTOP), ``raise`` (OSError, ENOSPC), ``hang`` (this
thread, for a minute; ``hang8``: for 8 seconds), and ``kill@N`` etc. for the N-th time that the point is passed (from
1, the default; ``@*`` for every time). Without the variable a point costs one look-up of an empty table.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time

_ACTION = re.compile(r"kill|exit|stop|raise|hang[0-9]{0,4}")
_table: dict[str, tuple[str, int]] = {}
_passed: dict[str, int] = {}


def load(text: str) -> None:
    """Read the variable's value, replacing what was set before.

    Raises:
        ValueError: Not of the form above.
    """
    _table.clear()
    _passed.clear()
    for entry in filter(None, text.split(",")):
        name, _, what = entry.partition(":")
        action, _, when = what.partition("@")
        if not name or not _ACTION.fullmatch(action):
            raise ValueError(f"SLURM_RESIL_FAULT: {entry!r} is not like 'agent.vote:kill@2'")
        _table[name] = (action, 0 if when == "*" else int(when or "1"))


def point(name: str) -> None:
    """Pass a point.

    Raises:
        OSError: ``raise`` was asked for here.
    """
    if not _table or name not in _table:
        return
    action, when = _table[name]
    _passed[name] = _passed.get(name, 0) + 1
    if when not in (0, _passed[name]):
        return
    if action == "raise":
        raise OSError(errno.ENOSPC, f"injected at {name}")
    if action == "exit":
        os._exit(99)
    if action.startswith("hang"):
        time.sleep(float(action.removeprefix("hang") or 60))
        return
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


load(os.environ.get("SLURM_RESIL_FAULT", ""))
