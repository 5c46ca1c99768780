"""What prolog and epilog cost a job's start and end: each run as slurmd runs it, in a process of its own.

The reference is the same interpreter that does nothing, ``python -I -S -c pass``, in the same run. The hooks work in a
directory of their own, for the calling user; the marks of a durable checkpoint are there, as after a drain.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from slurm_resil.bench.result import BenchResult
from slurm_resil.core import paths
from slurm_resil.core.errors import ResilError
from slurm_resil.hooks.command import command

REPEATS = 15
JOB = 7


def _seconds(argv: Sequence[str], env: Mapping[str, str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise ResilError(f"a hook failed with code {done.returncode}: {done.stderr.strip()}")
    return seconds


def _fill(job_dir: str) -> None:
    files = [paths.slot(job_dir, 0, index) for index in range(3)]
    files += [paths.manifest(job_dir, 5, 0), paths.durable(job_dir, 5), paths.run_info(job_dir)]
    for path in files:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write("{}")


def measure(*, repeats: int = REPEATS) -> BenchResult:
    """Measure.

    Args:
        repeats: Runs of each; the median counts.

    Returns:
        Figures ``prolog_ms``, ``epilog_ms`` (each with ``_worst``) and ``python_ms``, ratios against the latter.

    Raises:
        ResilError: A hook failed, or did not do what it is there for.
    """
    times: dict[str, list[float]] = {"python": [], "prolog": [], "epilog": []}
    env = {"SLURM_JOB_ID": str(JOB), "SLURM_JOB_UID": str(os.getuid()), "SLURM_JOB_GID": str(os.getgid())}
    env |= {"SPANK_SLURM_RESIL": "1", "PATH": os.defpath}
    with tempfile.TemporaryDirectory(prefix="resil-bench.") as work:
        config, root = os.path.join(work, "hooks.json"), os.path.join(work, "bb")
        os.mkdir(root, 0o755)
        job_dir = paths.job_dir(root, JOB)
        with open(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as file:
            json.dump({"bb_root": root, "log": os.path.join(work, "hooks.log")}, file)
        for turn in range(repeats + 1):
            took = {"python": _seconds([sys.executable, "-I", "-S", "-c", "pass"], env)}
            took["prolog"] = _seconds(command("prolog", config), env)
            if not os.path.isdir(job_dir):
                raise ResilError(f"the prolog made no {job_dir}")
            _fill(job_dir)
            took["epilog"] = _seconds(command("epilog", config), env)
            if os.path.exists(job_dir):
                raise ResilError(f"the epilog left {job_dir}")
            if turn > 0:  # the first one reads files and writes bytecode
                for name, seconds in took.items():
                    times[name].append(seconds * 1000)
    median = {name: statistics.median(found) for name, found in times.items()}
    return BenchResult(
        bench="hooks",
        size_bytes=0,
        repeats=repeats,
        ratios={f"{name}_over_python": round(median[name] / median["python"], 3) for name in ("prolog", "epilog")},
        figures={
            "prolog_ms": round(median["prolog"], 2),
            "epilog_ms": round(median["epilog"], 2),
            "prolog_worst_ms": round(max(times["prolog"]), 2),
            "epilog_worst_ms": round(max(times["epilog"]), 2),
            "python_ms": round(median["python"], 2),
        },
    )
