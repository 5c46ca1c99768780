"""What the launcher asks of Slurm, and the same for one host without Slurm."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from slurm_resil.core.errors import ConfigError, NotPermittedError, ServiceError, UsageError
from slurm_resil.core.model import EndTime
from slurm_resil.watch.deadline import JobTimes

TIMEOUT_S = 20.0
PING_S = 2.0
PING_AGAIN_S = 0.5
NO_TIMES = JobTimes(start_s=0.0, end=EndTime.unknown())
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z/:]*)=(.*?)(?=\s[A-Za-z][A-Za-z/:]*=|$)")
_REFUSED = (
    "access/permission denied",
    "invalid user id",
    "requested operation is presently disabled",
    "invalid job id",
    "batch job",
    "only batch jobs",
)


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What Slurm says about the job.

    Attributes:
        state: Its state; COMPLETING hides whether it was cancelled, preempted, requeued or timed out.
        restarts: How often it was started again.
        batch: Whether it is a batch job; only those can be requeued.
        requeue: Whether it may be requeued.
        preempted: Whether Slurm is taking it away for another one.
        timed_out: Whether it has used up its time.
        preempt_mode: How its partition is preempted.
        kill_wait_s: KillWait, seconds.
        times: When it began and when Slurm will end it.
    """

    state: str
    restarts: int = 0
    batch: bool = True
    requeue: bool = True
    preempted: bool = False
    timed_out: bool = False
    preempt_mode: str = ""
    kill_wait_s: float = 30.0
    times: JobTimes = NO_TIMES

    @property
    def cancelled(self) -> bool:
        """Whether somebody ended it who does not want it any more."""
        ending = self.state.split()[0] in ("COMPLETING", "CANCELLED", "CANCELLED+") if self.state else False
        return ending and not self.preempted and not self.timed_out

    def why_no_requeue(self) -> str:
        """Why Slurm would refuse to requeue it; empty if it would not."""
        if not self.batch:
            return "only batch jobs can be requeued, and this one was not submitted with sbatch"
        if not self.requeue:
            return "it was submitted with --no-requeue, or the site's JobRequeue is 0: add `#SBATCH --requeue`"
        return ""


class Cluster(Protocol):
    """See the module. All methods may take seconds, and raise ServiceError when nobody answers."""

    def record(self) -> JobRecord:
        """Look the job up."""
        ...

    def addresses(self, nodes: Sequence[str]) -> Mapping[str, str]:
        """Address of each node."""
        ...

    def alive(self, nodes: Sequence[str]) -> Mapping[str, bool]:
        """Whether the slurmd of each node accepts a connection."""
        ...

    def kill_step(self, name: str) -> None:
        """Kill the step with this name by SIGKILL."""
        ...

    def requeue(self, *, bad_nodes: Sequence[str]) -> str:
        """Requeue the job, as its owner; returns what to tell people.

        Raises:
            NotPermittedError: Slurm refuses, and will again.
        """
        ...

    def hold(self, reason: str) -> str:
        """Requeue the job held; raises as :meth:`requeue`."""
        ...


def fields(line: str) -> dict[str, str]:
    """Read a line of ``scontrol -o``."""
    return {match[1]: match[2].strip() for match in _FIELD.finditer(line.strip())}


def duration_s(text: str) -> float | None:
    """Read ``[days-]hours:minutes:seconds``; None for anything else (``UNLIMITED``, ``Partition_Limit``...)."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def times(job: Mapping[str, str]) -> JobTimes:
    """Read start and end from the fields of a job, whose times are Unix seconds (``SLURM_TIME_FORMAT=%s``)."""
    start, end = job.get("StartTime", ""), job.get("EndTime", "")
    if job.get("TimeLimit") == "UNLIMITED":
        limit = EndTime.unlimited()
    elif end.isdigit():
        limit = EndTime.known(datetime.fromtimestamp(int(end), UTC))
    else:
        limit = EndTime.unknown()
    return JobTimes(
        start_s=float(start) if start.isdigit() else 0.0,
        end=limit,
        preempted=job.get("PreemptTime", "None") not in ("None", ""),
    )


def reachable(address: str, port: int) -> bool:
    """Whether something accepts connections there; a refusal is tried once more, as a daemon may be restarting."""
    for again in (True, False):
        try:
            with socket.create_connection((address, port), timeout=PING_S):
                return True
        except ConnectionRefusedError:
            if again:
                time.sleep(PING_AGAIN_S)
        except OSError:
            return False
    return False


class SlurmCluster:
    """Slurm, through its commands.

    Args:
        job_id: Job.
        env: Environment of the commands.
    """

    def __init__(self, job_id: int, env: Mapping[str, str]) -> None:
        self._job_id = job_id
        self._env = {**env, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
        self._where: dict[str, tuple[str, int]] = {}

    def record(self) -> JobRecord:
        """See Cluster."""
        job = fields(self._run("scontrol", "-o", "show", "job", str(self._job_id)))
        if "JobState" not in job:
            raise ServiceError(f"scontrol knows nothing of job {self._job_id}", job=self._job_id)
        mode = fields(self._run("scontrol", "-o", "show", "partition", job.get("Partition", ""))).get("PreemptMode", "")
        wait = re.search(r"^KillWait\s*=\s*(\d+)", self._run("scontrol", "show", "config"), re.MULTILINE)
        used, limit = duration_s(job.get("RunTime", "")), duration_s(job.get("TimeLimit", ""))
        return JobRecord(
            state=job["JobState"],
            restarts=int(job.get("Restarts", "0")),
            batch=job.get("BatchFlag", "1") != "0",
            requeue=job.get("Requeue", "1") != "0",
            preempted=job.get("PreemptTime", "None") not in ("None", ""),
            timed_out=used is not None and limit is not None and used >= limit,
            preempt_mode=mode,
            kill_wait_s=float(wait[1]) if wait else 30.0,
            times=times(job),
        )

    def addresses(self, nodes: Sequence[str]) -> Mapping[str, str]:
        """See Cluster."""
        return {node: address for node, (address, _) in self._find(nodes).items()}

    def alive(self, nodes: Sequence[str]) -> Mapping[str, bool]:
        """See Cluster."""
        where = self._find(nodes)
        found: dict[str, bool] = {}

        def ask(node: str) -> None:
            found[node] = reachable(*where[node])

        threads = [threading.Thread(target=ask, args=(node,), daemon=True) for node in nodes if node in where]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def kill_step(self, name: str) -> None:
        """See Cluster."""
        listing = self._run("squeue", "--steps", "--noheader", "--jobs", str(self._job_id), "--format", "%i|%j")
        for line in listing.splitlines():
            step, _, title = line.strip().partition("|")
            if title == name:
                self._run("scancel", "--signal=KILL", step)

    def requeue(self, *, bad_nodes: Sequence[str]) -> str:
        """See Cluster."""
        self._run("scontrol", "requeue", str(self._job_id))
        if not bad_nodes:
            return "Slurm requeued the job; it starts again in about two minutes, unless the site says otherwise"
        names = ",".join(bad_nodes)
        try:
            # now that it is pending its owner may change this; the nodes it had are given back meanwhile
            self._run("scontrol", "update", f"JobId={self._job_id}", f"ExcNodeList={names}")
        except (ServiceError, NotPermittedError) as error:
            return f"Slurm requeued the job, but would not exclude {names}: {error.message}"
        return f"Slurm requeued the job without {names}; it starts again in about two minutes"

    def hold(self, reason: str) -> str:
        """See Cluster."""
        self._run("scontrol", "requeuehold", str(self._job_id))
        self._run("scontrol", "update", f"JobId={self._job_id}", f"Comment=resil: {reason}")
        return f"the job is held: {reason}; release it with: scontrol release {self._job_id}"

    def _find(self, nodes: Sequence[str]) -> Mapping[str, tuple[str, int]]:
        if not all(node in self._where for node in nodes):
            port = re.search(r"^SlurmdPort\s*=\s*(\d+)", self._run("scontrol", "show", "config"), re.MULTILINE)
            for line in self._run("scontrol", "-o", "show", "node", ",".join(nodes)).splitlines():
                node = fields(line)
                if "NodeName" in node:
                    own = node.get("Port") or (port[1] if port else "6818")
                    self._where[node["NodeName"]] = (node.get("NodeAddr") or node["NodeName"], int(own))
        return {node: self._where[node] for node in nodes if node in self._where}

    def _run(self, *argv: str) -> str:
        program = shutil.which(argv[0], path=self._env.get("PATH", os.defpath))
        if program is None:
            raise ConfigError(f"{argv[0]} is not found", mend="put Slurm's commands on PATH inside the job")
        # Slurm's kill sends SIGTERM to every process of the batch step, and the update that follows a requeue must go
        # on: the command inherits the mask of this thread
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            done = subprocess.run(
                [program, *argv[1:]],
                env=self._env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ServiceError(f"{argv[0]} did not answer in {TIMEOUT_S:g} s", job=self._job_id) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if done.returncode != 0:
            words = (done.stderr or done.stdout).strip() or f"{argv[0]} ended with code {done.returncode}"
            if any(text in words.lower() for text in _REFUSED):
                raise NotPermittedError(words, job=self._job_id)
            raise ServiceError(words, job=self._job_id)
        return done.stdout


class LocalCluster:
    """One host without Slurm: nothing can be requeued, and the only node is alive."""

    def record(self) -> JobRecord:
        """See Cluster."""
        return JobRecord(state="RUNNING", batch=False)

    def addresses(self, nodes: Sequence[str]) -> Mapping[str, str]:
        """See Cluster."""
        return dict.fromkeys(nodes, "127.0.0.1")

    def alive(self, nodes: Sequence[str]) -> Mapping[str, bool]:
        """See Cluster."""
        return dict.fromkeys(nodes, True)

    def kill_step(self, name: str) -> None:
        """See Cluster."""
        raise UsageError(f"there is no step {name} without Slurm")

    def requeue(self, *, bad_nodes: Sequence[str]) -> str:
        """See Cluster."""
        raise NotPermittedError("there is no Slurm to requeue anything")

    def hold(self, reason: str) -> str:
        """See Cluster."""
        raise NotPermittedError(f"there is no Slurm to hold anything: {reason}")
