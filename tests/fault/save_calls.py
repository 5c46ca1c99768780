"""A save, stopped or refused at every one of its calls in turn, each time in a fresh child; all is checked after each.

Started by the tests with shim.c preloaded:

    save_calls.py DIRECTORY SCENE ERRORS [torn]

SCENE is one of ``SCENES``, ERRORS a comma-separated list of errno names; empty: the child is killed instead, before
and after each call. Prints one JSON line. With ``torn`` files are published without a rename: the campaign must fail.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "ckpt"))

import ckptworld as w
import torch
from shim import Action, Fault, Shim

from slurm_resil.catalog import LocalCatalog
from slurm_resil.ckpt import seal as sealing
from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.memo import Memo
from slurm_resil.ckpt.snapshot import Arena
from slurm_resil.core import fsio
from slurm_resil.core.errors import ResilError
from slurm_resil.format import draft

# name -> number of saves before the one that is disturbed
SCENES = {"first": 0, "again": 3, "other layout": 3}
SLOTS = 2


def state(scene: str, iteration: int) -> dict[str, Any]:
    """Every element says which iteration it is of."""
    late = {"late": torch.full((700,), iteration)} if scene == "other layout" and iteration > 3 else {}
    torch.manual_seed(iteration)
    return {
        "big": torch.full((9000,), float(iteration)),
        "half": torch.full((33,), iteration, dtype=torch.bfloat16),
        "small": [torch.tensor(iteration), torch.rand(5)],
        "more": late,
        "n": iteration,
    }


class Saver:
    """Rank and agent in one: what they do to files, in their order."""

    def __init__(self, scene: str, job: str) -> None:
        self.scene, self.job = scene, job
        self.arena, self.memo = Arena(job, 0, slots=SLOTS), Memo()
        self.descriptions = draft.Descriptions(job)
        flatten(state(scene, 0), self.memo)

    def save(self, iteration: int) -> None:
        flat = flatten(state(self.scene, iteration), self.memo)
        written = self.arena.write(iteration % SLOTS, flat, iteration=iteration, run=w.run_info(), node="n0")
        heard = draft.read(self.job, self.arena.draft(written, flat), "the draft")
        sealing.seal(self.job, self.descriptions.complete(heard), sync=True)


def write_in_place(path: str, data: bytes, **_: Any) -> None:
    """What must not be done, in place of fsio.write_atomic."""
    with open(path, "wb") as file:
        file.write(data)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings(job: str) -> int:
    return Path("/proc/self/maps").read_text().count(job)


def disturbed(scene: str, job: str, fault: Fault | None, tell: int) -> None:
    """Child: save what comes before, then the one with the fault, then one more as if nothing had been."""
    saver, shim = Saver(scene, job), Shim()
    before = SCENES[scene]
    for iteration in range(1, before + 1):
        saver.save(iteration)
    why = ""
    shim.arm(os.path.dirname(job), fault)
    try:
        saver.save(before + 1)
    except (ResilError, OSError) as error:
        why = f"{type(error).__name__}: {error}"
    calls = shim.disarm()
    sealed = check(scene, job)
    saver.save(before + 1 + SLOTS)  # into the same slot
    files, maps = open_files(), mappings(job)
    saver.save(before + 1 + 2 * SLOTS)
    report = {"why": why, "calls": calls, "sealed": sealed, "files": files, "maps": maps}
    os.write(tell, json.dumps(report).encode())


def in_child(act: Callable[[int], None]) -> tuple[int, dict[str, Any]]:
    """Run in a child; returns its status and what it has told."""
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hear)
        code = 1
        try:
            act(tell)
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    os.close(tell)
    with open(hear, "rb") as file:
        told = file.read()
    return os.waitpid(child, 0)[1], json.loads(told) if told else {}


def check(scene: str, job: str) -> list[int]:
    """Everything that is a candidate is whole and of one iteration; returns which there are."""
    catalog = LocalCatalog(job, run_id="r1")
    found = sorted(catalog.sealed())
    for iteration in found:
        sealing.verify(job, catalog.load(iteration, 0))
        other = state(scene, iteration)
        for tensor in (other["big"], other["half"], *other["small"], *other["more"].values()):
            tensor.zero_()
        other["n"] = 0
        w.load(job, other, iteration=iteration)
        assert w.bits(other) == w.bits(state(scene, iteration)), iteration
    return found


@contextlib.contextmanager
def place(directory: Path) -> Iterator[str]:
    """A burst buffer of its own for one child."""
    root = directory / "one"
    root.mkdir()
    try:
        yield w.job(root)
    finally:
        shutil.rmtree(root)


def kill_at(directory: Path, scene: str, fault: Fault) -> bool:
    """Kill a save; returns whether the new iteration is there."""
    before = SCENES[scene]
    with place(directory) as job:
        status, _ = in_child(lambda tell: disturbed(scene, job, fault, tell))
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (fault, status)
        found = check(scene, job)
        # the one before is in the other slot: it is there whatever happens to this one
        assert set(found) <= {before - 1, before, before + 1} - {0, -1}, (fault, found)
        assert not before or before in found, (fault, found)
        after = Saver(scene, job)
        after.save(before + 1 + SLOTS)
        after.arena.close()
        assert check(scene, job)[-1] == before + 1 + SLOTS
        return before + 1 in found


def refuse_at(directory: Path, scene: str, fault: Fault, clean: dict[str, Any]) -> bool:
    """Refuse a call of a save; returns whether the save has failed."""
    before = SCENES[scene]
    with place(directory) as job:
        status, told = in_child(lambda tell: disturbed(scene, job, fault, tell))
        assert status == 0, fault
        if before:
            assert before in told["sealed"], (fault, told)
        # what is sealed was not refused, and the other way round; but for one that could not be taken back
        sealed, kept = before + 1 in told["sealed"], fault.for_good and told["calls"][-2:] == ["fsync", "unlink"]
        assert sealed == (not told["why"] or kept), (fault, told)
        assert (told["files"], told["maps"]) == (clean["files"], clean["maps"]), (fault, told, clean)
        found = check(scene, job)
        assert found[-1] == before + 1 + 2 * SLOTS, (fault, found)
        return bool(told["why"])


def main() -> None:
    directory, scene, errors = Path(sys.argv[1]), sys.argv[2], list(filter(None, sys.argv[3].split(",")))
    torch.set_num_threads(1)
    draft.SENT_CHARS = 100  # drafts too are files
    if sys.argv[4:] == ["torn"]:
        fsio.write_atomic = write_in_place
    with place(directory) as job:
        status, clean = in_child(lambda tell: disturbed(scene, job, None, tell))
        assert status == 0
        assert not clean["why"]
        check(scene, job)
    calls = clean["calls"]
    numbers = range(1, len(calls) + 1)
    report: dict[str, Any] = {"calls": calls, "runs": 0}
    if not errors:
        kinds = (Action.KILL_BEFORE, Action.KILL_AFTER)
        new = [kill_at(directory, scene, Fault(nth, kind)) for nth in numbers for kind in kinds]
        report |= {"runs": len(new), "new": sum(new), "old": len(new) - sum(new)}
    else:
        faults = [
            Fault(nth, Action.FAIL, getattr(errno, name), for_good)
            for nth in numbers
            for name in errors
            for for_good in (False, True)
        ]
        faults += [
            Fault(nth, Action.SHORT, errno.ENOSPC, for_good)
            for nth in numbers
            if calls[nth - 1] == "write"
            for for_good in (False, True)
        ]
        failed = [refuse_at(directory, scene, fault, clean) for fault in faults]
        report |= {"runs": len(faults), "failed": sum(failed), "saved": len(failed) - sum(failed)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
