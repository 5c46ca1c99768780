"""Movers of a job that do not end well, as the launcher starts them: `steps_job.py CASE` in a batch script.

Prints one JSON line: the job, srun's exit code, what srun said, and the seconds from what happened to the end. The
movers are this file, too: a step's environment says which case it is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from slurm_resil.core.layout import Layout
from slurm_resil.core.model import RunInfo
from slurm_resil.launch import steps
from slurm_resil.launch.cluster import SlurmCluster
from slurm_resil.launch.commands import Job, Move
from slurm_resil.launch.starters import SrunStarter

ITERATION = 30
SLOW_S = 2.5


def job(case: str) -> Job:
    env = {**os.environ, "CASE": case, **({"SLOW_START": str(SLOW_S)} if case == "slow" else {})}
    number, nodes = int(os.environ["SLURM_JOB_ID"]), ("node1", "node2")
    return Job(
        info=RunInfo(run_id="run", job_id=number, attempt=0, cycle=0, world_size=2, nodes=2),
        layout=Layout(nodes=nodes, ranks_per_node=1),
        addresses={},
        run_dir="/nowhere/run",
        job_dir="/nowhere/job",
        restarts=0,
        every=None,
        leader="127.0.0.1:9",
        python=os.path.abspath(__file__),
        base_env=env,
    )


def running(number: int) -> str:
    """The step of the mover, once Slurm has made it."""
    while True:
        argv = ["squeue", "--steps", "--noheader", "--jobs", str(number), "--format", "%i|%j"]
        for line in subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines():
            step, _, name = line.strip().partition("|")
            if name == f"resil-drain-{ITERATION}@0":
                return step
        time.sleep(0.05)


def main(case: str) -> None:
    steps.KILL_WAITS_S = (1.0,) * 20  # no other way than to ask Slurm again
    made = job(case)
    over = threading.Event()
    heard: list[tuple[int, Sequence[str]]] = []

    def ended(code: int, lines: Sequence[str], _: float) -> None:
        heard.append((code, lines))
        over.set()

    starter = SrunStarter(made, SlurmCluster(made.info.job_id, os.environ))
    step = starter.mover(Move(kind="drain", iteration=ITERATION), lambda _: None, ended)
    name = running(made.info.job_id)
    if case == "slow":
        time.sleep(0.5)  # it is starting, and that takes longer
        # as at a preemption: this one is delivered when the step has started, and the next one is not
        sent = subprocess.Popen(["scancel", "--signal=CONT", name])
        time.sleep(0.3)
        step.kill()
    since = time.monotonic()
    over.wait(100)
    seconds = time.monotonic() - since
    if case == "slow":
        sent.wait()
    print(
        json.dumps({"job": made.info.job_id, "code": heard[0][0], "lines": list(heard[0][1]), "seconds": seconds}),
        flush=True,
    )


def mover(case: str) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that finishes in the grace period
    first = os.environ["SLURM_PROCID"] == "1"
    if case == "killed" and first:
        os.kill(os.getpid(), signal.SIGKILL)
    if case in ("told", "untold") and first:
        return 65
    time.sleep(1.0 if case == "told" else 100)
    return 65


if __name__ == "__main__":
    if "SLURM_STEP_ID" in os.environ and "CASE" in os.environ:
        sys.exit(mover(os.environ["CASE"]))
    main(sys.argv[1])
