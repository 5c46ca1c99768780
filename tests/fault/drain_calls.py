"""A drain, stopped or refused at every one of its calls on the file system in turn; the next one makes it durable.

Started by the tests with shim.c preloaded: ``drain_calls.py DIRECTORY ERRORS``; ERRORS is a comma-separated list of
errno names; empty: the child is killed instead, before and after each call. Prints one JSON line.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "drain"))

from shardworld import ITERATION, World, build
from shim import Action, Fault, Shim

from slurm_resil.core import paths
from slurm_resil.core.errors import ResilError
from slurm_resil.drain import find, writing

writing.SYNC_BYTES, writing._SYNCS = 1, 1 << 40  # the journal grows with every round


def drained(world: World, fault: Fault | None) -> tuple[int, dict[str, Any]]:
    """Drain in a child; returns its status and what it has told."""
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hear)
        shim, why = Shim(), ""
        shim.arm(world.run_dir, fault)
        try:
            world.drain(buffer_bytes=8192)
        except (ResilError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
        os.write(tell, json.dumps({"why": why, "calls": shim.disarm()}).encode())
        os._exit(0)
    os.close(tell)
    with open(hear, "rb") as file:
        told = file.read()
    return os.waitpid(child, 0)[1], json.loads(told) if told else {}


def once(root: Path, fault: Fault | None) -> tuple[bool, dict[str, Any]]:
    """One drain with a fault and one without; returns whether the first was durable, and what it has told."""
    world = build(root, ranks=1, scale=20)
    world.seal()
    try:
        status, told = drained(world, fault)
        killed = fault is not None and fault.action in (Action.KILL_BEFORE, Action.KILL_AFTER)
        assert (os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0) == (signal.SIGKILL if killed else 0), fault
        published = find.durable(world.run_dir, ITERATION) is not None
        assert published == os.path.exists(paths.drained_manifest(world.run_dir, ITERATION)), fault
        if not killed and not told["why"]:
            assert published, (fault, told)
        outcome = world.drain()
        assert outcome.already == published, (fault, told)
        for name in world.leftovers():  # a temporary name that nobody could take away any more
            assert not name.endswith(".part"), (fault, name)
            os.unlink(os.path.join(world.run_dir, name))
        world.check()
        return published, told
    finally:
        shutil.rmtree(root / "pfs")
        shutil.rmtree(root / "node0")


def main() -> None:
    root, errors = Path(sys.argv[1]), list(filter(None, sys.argv[2].split(",")))
    _, clean = once(root, None)
    assert not clean["why"]
    calls = clean["calls"]
    numbers = range(1, len(calls) + 1)
    if errors:
        faults = [
            Fault(nth, Action.FAIL, getattr(errno, name), lasts)
            for nth in numbers
            for name in errors
            for lasts in (False, True)
        ]
        faults += [Fault(nth, Action.SHORT, errno.ENOSPC, False) for nth in numbers if calls[nth - 1] == "write"]
    else:
        faults = [Fault(nth, kind) for nth in numbers for kind in (Action.KILL_BEFORE, Action.KILL_AFTER)]
    done = [once(root, fault) for fault in faults]
    failed = sum(1 for _, told in done if told.get("why"))
    print(json.dumps({"calls": calls, "runs": len(done), "durable": sum(one for one, _ in done), "failed": failed}))


if __name__ == "__main__":
    main()
