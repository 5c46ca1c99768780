"""Saves in a child process that is killed at seeded moments, again and again; after each kill everything is checked.

Usage: kill_saver.py DIRECTORY SEED ROUNDS. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "unit" / "ckpt"))

import ckptworld as w
import torch

from slurm_resil.catalog import LocalCatalog
from slurm_resil.ckpt import seal
from slurm_resil.ckpt.snapshot import Arena

SLOTS = 2


def state(iteration: int) -> dict:
    """Every element says which iteration it is of; the layout changes now and then."""
    torch.manual_seed(iteration)
    extra = {"late": torch.full((100,), iteration)} if iteration % 7 > 3 else {}
    return {
        "big": torch.full((300_000,), float(iteration)),
        "small": [torch.tensor(iteration), torch.rand(50)],
        "more": extra,
        "n": iteration,
    }


def save_on(job: str, start: int, tell: int) -> None:
    """Save one iteration after the other, for ever."""
    arena = Arena(job, 0, slots=SLOTS)
    iteration = start
    while True:
        w.save(arena, job, state(iteration), index=iteration % SLOTS, iteration=iteration)
        os.write(tell, b".")
        iteration += 1


def check(job: str) -> int:
    """All that is a candidate must be whole and of one iteration; returns the newest."""
    catalog = LocalCatalog(job, run_id="r1")
    found = sorted(catalog.sealed())
    for iteration in found:
        manifest = catalog.load(iteration, 0)
        seal.verify(job, manifest)
        other = state(iteration + 7)
        w.load(job, other, iteration=iteration)
        assert w.bits(other) == w.bits(state(iteration)), iteration
    return found[-1] if found else 0


def main() -> None:
    directory, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    chance = random.Random(seed)
    job = w.job(directory)
    os.makedirs(f"{job}/slots", mode=0o700)
    newest, saved, torn = 0, 0, 0
    for _ in range(rounds):
        hear, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_on(job, newest + 1, tell)
            finally:
                os._exit(1)
        os.close(tell)
        for _ in range(chance.randrange(3)):  # some saves are let through, then the kill comes at any moment
            assert os.read(hear, 1) == b"."
        select.select([], [], [], chance.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        os.close(hear)
        now = check(job)
        assert now >= newest, "a sealed checkpoint was lost"
        torn += len([name for name in os.listdir(f"{job}/slots") if name.endswith(".tmp")])
        saved += now - newest
        newest = now
    print(json.dumps({"rounds": rounds, "saved": saved, "left_over": torn, "files": len(os.listdir(f"{job}/slots"))}))


if __name__ == "__main__":
    main()
