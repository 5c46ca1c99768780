"""The job that makes durable what this one leaves on its nodes, if it leaves anything.

It is submitted when the launcher starts, held and dependent on the end of this job, so that nothing has to go well at
the end: too little time, a job that is killed, a launcher that is gone. It is released as soon as there is something
that it may be needed for, and cancelled when all is durable. The job's nodes are asked for by name.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence

from ClusterShell.NodeSet import NodeSet

from slurm_resil.core import fsio
from slurm_resil.core.errors import DataError, ResilError, ServiceError
from slurm_resil.core.latecall import command, environment
from slurm_resil.slurm.scontrol import Commands

_KEEP = ("HOME", "USER", "LOGNAME", "PATH", "SLURM_CONF")
_SAME = (("--partition", "SLURM_JOB_PARTITION"), ("--account", "SLURM_JOB_ACCOUNT"), ("--qos", "SLURM_JOB_QOS"))
_SPARE_S = 120  # of the job beyond the time of the drain itself

Tell = Callable[..., object]
"""Hears an event by its name, with fields."""


class LateJob:
    """See the module. Every method may be called from any thread, and takes as long as Slurm does.

    Args:
        job_id: The job that it depends on.
        nodes: Its nodes.
        job_dir: Its directory in each node's burst buffer.
        run_dir: Run's directory.
        limit_s: Longest time of the drain, seconds.
        env: Environment of the launcher.
        tell: Hears ``late_job`` with the number, or ``warning`` with words.

    Attributes:
        released: Whether it runs when this job ends.
    """

    def __init__(
        self,
        job_id: int,
        nodes: Sequence[str],
        job_dir: str,
        run_dir: str,
        *,
        limit_s: float,
        env: Mapping[str, str],
        tell: Tell,
    ) -> None:
        self._job_id, self._nodes, self._job_dir, self._run_dir = job_id, tuple(nodes), job_dir, run_dir
        self._limit_s, self._env, self._tell = int(limit_s), env, tell
        kept = {name: env[name] for name in _KEEP if name in env}
        self._slurm = Commands(environment(**kept))
        self._lock = threading.Lock()
        self._record = os.path.join(run_dir, "late-job.json")
        self._late: int | None = None
        self.released = False

    def submit(self) -> None:
        """Submit it, and cancel the one of an attempt before; what does not work is told, and training goes on."""
        with self._lock:
            self._cancel_before()
            path = os.path.join(self._run_dir, f"late-{self._job_id}.sh")
            try:
                fsio.write_atomic(path, self.script().encode(), mode=0o600)
                try:
                    said = self._slurm.run("sbatch", *self.options(), path)
                finally:
                    os.unlink(path)
                number = re.match(r"(\d+)(;|$)", said.strip())
                if number is None:
                    raise ServiceError(f"sbatch said {said.strip()!r}")
                self._late = int(number[1])
                fsio.write_json(self._record, {"job_id": self._job_id, "late_job_id": self._late})
            except (ResilError, OSError) as error:
                words = error.message if isinstance(error, ResilError) else f"{self._run_dir}: {error.strerror}"
                self._tell("warning", words=f"no job stands by to drain what this one may leave: {words}")
                return
        self._tell("late_job", late_job_id=self._late)

    def needed(self) -> None:
        """There is something that is not durable: from now on nobody has to release it."""
        with self._lock:
            if self._late is None or self.released:
                return
            try:
                self._slurm.run("scontrol", "release", str(self._late))
                self.released = True
            except ResilError as error:
                self._tell("warning", words=f"job {self._late} could not be released: {error.message}")

    def not_needed(self) -> None:
        """All is durable, or the job goes on: cancel it."""
        with self._lock:
            if self._late is not None:
                self._cancel(self._late)
                self._late = None
                with contextlib.suppress(OSError):
                    os.unlink(self._record)

    def options(self) -> list[str]:
        """Options of sbatch."""
        count = len(self._nodes)
        options = ["--parsable", "--hold", f"--dependency=afterany:{self._job_id}", "--no-requeue"]
        options += [f"--job-name=resil-late-{self._job_id}", f"--nodelist={NodeSet.fromlist(self._nodes)}"]
        options += [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--cpus-per-task=1", "--export=ALL"]
        options += [f"--time={-(-(self._limit_s + _SPARE_S) // 60)}", f"--chdir={self._run_dir}"]
        options += [f"--output={self._run_dir}/late-%j.out"]
        return options + [f"{option}={self._env[name]}" for option, name in _SAME if self._env.get(name)]

    def script(self) -> str:
        """What it runs: on each node the same as the epilog starts, each for itself."""
        count = len(self._nodes)
        srun = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--mpi=none"]
        srun += ["--cpu-bind=none", "--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--label"]
        return f"#!/bin/bash\nexec {shlex.join([*srun, *command(self._job_dir, self._limit_s)])}\n"

    def _cancel_before(self) -> None:
        try:
            raw = fsio.read_json(self._record, limit_bytes=1 << 16)
            job_id, late = int(raw["job_id"]), int(raw["late_job_id"])
        except (OSError, DataError, KeyError, TypeError, ValueError):
            return
        if job_id == self._job_id:  # that of another job may be at work, or have to come
            self._cancel(late)

    def _cancel(self, late: int) -> None:
        with contextlib.suppress(ResilError):
            # by its name too: a number that is given again is somebody else's
            self._slurm.run("scancel", "--quiet", f"--name=resil-late-{self._job_id}", str(late))
