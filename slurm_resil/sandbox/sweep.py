"""Find processes of a sandbox by their environment and their descent, and kill them so that none escapes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable

from slurm_resil.sandbox.procs import Proc, wait_gone
from slurm_resil.sandbox.spec import Layout

OF_ENV = "SLURM_RESIL_SANDBOX_OF"
NODE_ENV = "SLURM_RESIL_SANDBOX_NODE"
_ROUNDS = 20

Environment = frozenset[bytes]


def of_sandbox(layout: Layout) -> Callable[[Environment], bool]:
    """Processes of this sandbox: daemons and commands by our mark, jobs by Slurm's."""
    mark = f"{OF_ENV}={layout.dir}".encode()
    conf = f"SLURM_CONF={layout.slurm_conf}".encode()

    def matches(entries: Environment) -> bool:
        return mark in entries or (conf in entries and any(entry.startswith(b"SLURM_JOB_ID=") for entry in entries))

    return matches


def of_node(layout: Layout, node: str) -> Callable[[Environment], bool]:
    """Processes of one node: slurmd and its stepds by our mark, tasks by Slurm's."""
    mark = f"{OF_ENV}={layout.dir}".encode()
    name = f"{NODE_ENV}={node}".encode()
    task = f"SLURMD_NODENAME={node}".encode()
    conf = f"SLURM_CONF={layout.slurm_conf}".encode()

    def matches(entries: Environment) -> bool:
        return (mark in entries and name in entries) or (task in entries and conf in entries)

    return matches


def kill_matching(matches: Callable[[Environment], bool], *, also: Iterable[Proc] = ()) -> None:
    """Kill all processes whose environment matches, those in ``also``, and the descendants of both.

    This process and its ancestors are spared: a shell opened by ``exec`` may call ``down``.

    Raises:
        ServiceError: Some do not die.
    """
    known = set(also)
    for _ in range(_ROUNDS):
        spared = _own_line()
        found = {proc for proc in known | _matching(matches) if proc.alive and proc.pid not in spared}
        if not found:
            return
        found |= _descendants(found, spared)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none forks while others die
            for proc in found:
                proc.kill(number)
        wait_gone(found)


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _own_line() -> set[int]:
    line, pid = set(), os.getpid()
    while pid > 1 and pid not in line:
        line.add(pid)
        pid = _parent(pid)
    return line


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _matching(matches: Callable[[Environment], bool]) -> set[Proc]:
    found = set()
    for pid in _pids():
        proc = Proc.of(pid)  # before its environment is read: another process that gets the pid has another start
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                entries = frozenset(file.read().split(b"\0"))
        except OSError:
            continue
        if proc is not None and matches(entries):
            found.add(proc)
    return found


def _descendants(roots: set[Proc], spared: set[int]) -> set[Proc]:
    inside = {proc.pid for proc in roots}
    parents = {pid: _parent(pid) for pid in _pids()}
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in inside and pid not in inside | spared}
        inside |= more
        grew = bool(more)
    found = (Proc.of(pid) for pid in inside)
    return {proc for proc in found if proc is not None}
