"""What a sandbox looks like when a test fails: what runs on each node, and the last words of Slurm's daemons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from slurm_resil.sandbox import Sandbox

LINES = 40
WIDTH = 200
PS = ["ps", "-eLo", "pid,ppid,tid,stat,wchan:24,etimes,user,comm,args"]


def _some(lines: Iterable[str], keep: int) -> list[str]:
    """The last so many lines, none too long."""
    found = list(lines)
    left = len(found) - keep
    return [*([f"({left} lines before)"] if left > 0 else []), *(line[:WIDTH] for line in found[-keep:])]


def _processes(sandbox: Sandbox, node: str) -> list[str]:
    if not sandbox.node_alive(node):
        return ["(the node is dead)"]
    listing = sandbox.run(PS, node=node, check=False, timeout_s=10).stdout.splitlines()
    return [line[:WIDTH] for line in listing[:1]] + _some(listing[1:], 3 * LINES)


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2 * LINES * WIDTH))
        return _some(file.read().decode(errors="replace").splitlines(), LINES)


def _tried(see: Callable[..., list[str]], *arguments: object) -> list[str]:
    try:
        return see(*arguments)
    except Exception as error:  # noqa: BLE001 - the test has failed already, and its own words are what counts
        return [f"(cannot be seen: {error})"]


def look(sandbox: Sandbox) -> str:
    """Bounded text; what cannot be seen is said instead."""
    log = sandbox.layout.log
    words = []
    for node in sandbox.nodes:
        words += [f"== {node}: processes", *_tried(_processes, sandbox, node)]
        words += [f"== {node}: slurmd", *_tried(_tail, log / f"slurmd-{node}.log")]
    return "\n".join([*words, "== slurmctld", *_tried(_tail, log / "slurmctld.log")])
