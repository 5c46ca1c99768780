"""Saves 200 times and prints what the process holds after the 20th and the last: one JSON line.

Usage: flat_memory.py DIRECTORY. A process of its own, so that nothing but the saves is measured.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "unit" / "ckpt"))

import ckptworld as w
import torch

from slurm_resil.ckpt.snapshot import Arena

BIG = 4 << 20  # elements of 4 bytes


def facts(job: str, arena: Arena) -> dict[str, int]:
    for slot in arena._slots.values():
        bytes(slot.map[:: mmap.PAGESIZE])  # a host that needs memory takes mapped pages away: what is held is counted
    ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps of tensors that are gone differs from time to time
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    return {"rss": rss, "maps": maps, "fds": len(os.listdir("/proc/self/fd")), "files": len(os.listdir(f"{job}/slots"))}


def main() -> None:
    torch.set_num_threads(1)
    job = w.job(Path(sys.argv[1]))
    arena = Arena(job, 0, slots=3)
    state = w.training(1, 1, width=256)
    report = {}
    for save in range(200):
        state["big"] = torch.full((BIG,), float(save))  # a new tensor each time
        manifest = w.save(arena, job, state, index=save % 3, iteration=save + 1)
        if save in (19, 199):
            report["start" if save == 19 else "end"] = facts(job, arena)
    print(json.dumps({**report, "nbytes": manifest.nbytes, "manifests": len(os.listdir(f"{job}/manifests"))}))


if __name__ == "__main__":
    main()
