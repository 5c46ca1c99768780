"""Plain ways to bring the bytes of some files to a file system, each by as many processes as there are files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurm_resil.bench.launch import mpiexec
from slurm_resil.core.errors import ConfigError, ResilError

FIRST = 4096  # byte of a slot at which the data begin


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Where runs of one file go in a file for all: ``first`` + n * ``step``, ``nbytes`` each."""

    first: int
    step: int
    nbytes: int


def dd(sources: Sequence[str], target: str) -> float:
    """One ``dd`` for each file, synced; seconds."""
    command = _found("dd")
    return _timed(
        target,
        lambda out: [
            [command, f"if={source}", f"of={out}/{number}", "bs=4M", "conv=fsync", "status=none"]
            for number, source in enumerate(sources)
        ],
    )


def cp(sources: Sequence[str], target: str) -> float:
    """``cp -r`` of each file's directory at the same time, then synced; seconds."""
    command = _found("cp")
    return _timed(
        target,
        lambda out: [
            [command, "-r", "--reflink=never", os.path.dirname(source), f"{out}/{number}"]
            for number, source in enumerate(sources)
        ],
    )


def dcp_command() -> str | None:
    """``dcp`` of mpifileutils, if it is here."""
    return shutil.which("dcp")


def dcp(sources: Sequence[str], target: str) -> float:
    """``dcp`` of all files by as many processes, then synced; seconds."""
    return _timed(target, lambda out: [[mpiexec(), "-n", str(len(sources)), _found("dcp"), "-q", *sources, out]])


def naive(sources: Sequence[str], runs: Sequence[Runs], target: str) -> float:
    """Each process writes its runs into one file, one by one, and syncs; seconds."""
    return _timed(
        target,
        lambda out: [
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                _NAIVE,
                source,
                f"{out}/all",
                *(str(n) for n in (FIRST, one.first, one.step, one.nbytes)),
            ]
            for source, one in zip(sources, runs, strict=True)
        ],
    )


_NAIVE = """
import mmap, os, sys
source, target = sys.argv[1:3]
skip, at, step, size = map(int, sys.argv[3:])
with open(source, "rb") as file:
    data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
fd = os.open(target, os.O_WRONLY | os.O_CREAT, 0o600)
write = os.pwrite
for begin in range(skip, len(data), size):
    write(fd, data[begin : begin + size], at)
    at += step
os.fsync(fd)
"""


def _timed(target: str, argvs: Callable[[str], Sequence[Sequence[str]]]) -> float:
    with tempfile.TemporaryDirectory(dir=target) as out:
        commands = argvs(out)
        begin = time.monotonic()
        running = [subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) for argv in commands]
        ends = [(process.communicate()[1], process.returncode) for process in running]
        for where, _, names in os.walk(out):
            for name in names:
                _sync(os.path.join(where, name))
        seconds = time.monotonic() - begin
    for words, code in ends:
        if code:
            raise ResilError(f"{os.path.basename(commands[0][0])} ended with {code}: {words.strip()[-300:]}")
    return seconds


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _found(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ConfigError(f"there is no {name}", mend="install coreutils" if name in ("dd", "cp") else "")
    return path
