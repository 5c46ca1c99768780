"""What the benchmarks of save and restore share: the state, the cores, the place and the clock."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

FEW, MANY = 200, 20_000  # tensors
SEALED_S = 120.0


def model(size_bytes: int, tensors: int, dtype: torch.dtype) -> nn.Module:
    """Make a model of equal parameters: ``tensors`` of them, ``size_bytes`` together."""
    count = max(1, size_bytes // tensors // dtype.itemsize)
    made = nn.Module()
    for index in range(tensors):
        made.register_parameter(f"p{index}", nn.Parameter(torch.randn(count).to(dtype)))
    return made


@contextlib.contextmanager
def cores() -> Iterator[Callable[[bool], None]]:
    """Yields what moves this process to the core of the training (True) or of the helpers that it starts (False)."""
    before, threads = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
    torch.set_num_threads(1)

    def move(training: bool) -> None:
        os.sched_setaffinity(0, {before[0] if training else before[-1]})

    try:
        yield move
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors one by one, as anybody would."""
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def seconds(call: Callable[[], object]) -> float:
    """Time of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextlib.contextmanager
def place(directory: str | None) -> Iterator[str]:
    """Make a directory in ``directory`` (default ``/dev/shm``), gone afterwards; torch does not warn meanwhile."""
    within = directory or ("/dev/shm" if os.path.isdir("/dev/shm") else None)  # noqa: S108 - a fresh directory in it
    with tempfile.TemporaryDirectory(prefix="resil-bench.", dir=within) as work, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own formats
        yield work


def environment(work: str) -> dict[str, str]:
    """Make the burst buffer of a run below a directory, and what to give to ``Checkpointer.from_env``."""
    bb_root = os.path.join(work, "bb")
    os.makedirs(bb_root)
    return {
        "SLURM_RESIL_RUN_ID": "bench",
        "SLURM_RESIL_BB_ROOT": bb_root,
        "SLURM_RESIL_PREFIX": os.path.join(work, "pfs"),
    }


def job_dir(work: str) -> str:
    """Job's directory in the burst buffer of :func:`environment`, once there has been a Checkpointer."""
    bb_root = os.path.join(work, "bb")
    (name,) = os.listdir(bb_root)
    return os.path.join(bb_root, name)
