"""Saves through torch.distributed.checkpoint, killed at a named point, each in a fresh child. Run by test_points.

    dcp_kills.py DIRECTORY POINT...

Prints one JSON line: for each point what is loaded afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import slurm_resil as sr
from slurm_resil.core import faults


def state(value: int) -> dict[str, object]:
    return {"a": torch.full((5000,), float(value)), "b": {"c": torch.full((7,), value)}, "n": value}


def save(root: str, value: int) -> None:
    dcp.save(state(value), storage_writer=sr.dcp.Writer(root, keep=1), no_dist=True)


def killed(root: str, point: str) -> None:
    child = os.fork()
    if child == 0:
        try:
            save(root, 1)
            faults.load(f"{point}:kill")
            save(root, 2)
        finally:
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{point} was not come to: {status}"


def loaded(root: str) -> int:
    """What is there: all of one save."""
    found = state(0)
    dcp.load(found, storage_reader=sr.dcp.Reader(root), no_dist=True)
    value = int(found["n"])  # type: ignore[call-overload] # a number
    want = state(value)
    assert torch.equal(found["a"], want["a"])  # type: ignore[arg-type] # a tensor
    assert torch.equal(found["b"]["c"], want["b"]["c"])  # type: ignore[index] # a mapping
    return value


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    report = {}
    for point in sys.argv[2:]:
        root = str(Path(sys.argv[1], point))
        killed(root, point)
        report[point] = loaded(root)
        save(root, 3)
        assert loaded(root) == 3
    print(json.dumps(report))


main()
