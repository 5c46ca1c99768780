"""Restores from a slot and from a drained file, and prints what the process held at most beyond what it had before.

Usage: restore_memory.py DIRECTORY TENSORS. One JSON line: bytes, those of the mapped slot not counted. A process of its
own, so that nothing but the restores is measured.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ckptworld as w
import torch

STATE_BYTES = 192 << 20


def held(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def most(call: Callable[[], object]) -> int:
    before = held("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # what is held at most is counted from now on
    call()
    return held("VmHWM") - before


def main() -> None:
    torch.set_num_threads(1)
    directory, tensors = Path(sys.argv[1]), int(sys.argv[2])
    job, run = w.job(directory), str(directory / "r1")
    state = {str(index): torch.ones(STATE_BYTES // tensors // 4) for index in range(tensors)}
    w.save_new(job, state)
    w.drain(job, run)
    (slot,) = Path(job, "slots").iterdir()
    report = {}
    for name, restore in (("local", lambda: w.load(job, state)), ("drained", lambda: w.load_drained(run, state, 0, 1))):
        restore()  # what is loaded and cached once
        for tensor in state.values():
            tensor.zero_()
        report[name] = most(restore) - (os.path.getsize(slot) if name == "local" else 0)
        assert all(bool((tensor == 1).all()) for tensor in state.values())
    print(json.dumps(report))


if __name__ == "__main__":
    main()
