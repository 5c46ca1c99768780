"""What the launcher asks of Slurm, and the same for one host without Slurm."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from slurm_resil.core.errors import NotPermittedError, ServiceError, UsageError
from slurm_resil.core.model import EndTime
from slurm_resil.slurm.ping import reachable
from slurm_resil.slurm.scontrol import Commands, duration_s, fields
from slurm_resil.watch.deadline import JobTimes

NO_TIMES = JobTimes(start_s=0.0, end=EndTime.unknown())


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
        partition: Where it runs.
        times: When it began and when Slurm will end it.
    """

    state: str
    restarts: int = 0
    batch: bool = True
    requeue: bool = True
    preempted: bool = False
    timed_out: bool = False
    partition: str = ""
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


@dataclass(frozen=True, kw_only=True)
class Customs:
    """How a site ends jobs.

    Attributes:
        kill_wait_s: KillWait, seconds.
        preempt_mode: How the job's partition is preempted.
    """

    kill_wait_s: float = 30.0
    preempt_mode: str = ""


class Cluster(Protocol):
    """See the module. All methods may take seconds, and raise ServiceError when nobody answers."""

    def record(self) -> JobRecord:
        """Look the job up."""
        ...

    def customs(self, partition: str) -> Customs:
        """Look up how jobs of a partition are ended."""
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


class SlurmCluster:
    """Slurm, through its commands.

    Args:
        job_id: Job.
        env: Environment of the commands.
    """

    def __init__(self, job_id: int, env: Mapping[str, str]) -> None:
        self._job_id = job_id
        self._slurm = Commands(env)
        self._where: dict[str, tuple[str, int]] = {}

    def record(self) -> JobRecord:
        """See Cluster."""
        job = self._slurm.show("job", str(self._job_id))
        if "JobState" not in job:
            raise ServiceError(f"scontrol says nothing of the state of job {self._job_id}", job=self._job_id)
        used, limit = duration_s(job.get("RunTime", "")), duration_s(job.get("TimeLimit", ""))
        return JobRecord(
            state=job["JobState"],
            restarts=int(job.get("Restarts", "0")),
            batch=job.get("BatchFlag", "1") != "0",
            requeue=job.get("Requeue", "1") != "0",
            preempted=job.get("PreemptTime", "None") not in ("None", ""),
            timed_out=used is not None and limit is not None and used >= limit,
            partition=job.get("Partition", ""),
            times=times(job),
        )

    def customs(self, partition: str) -> Customs:
        """See Cluster."""
        wait = re.search(r"^KillWait\s*=\s*(\d+)", self._slurm.run("scontrol", "show", "config"), re.MULTILINE)
        mode = self._slurm.show("partition", partition).get("PreemptMode", "")
        return Customs(kill_wait_s=float(wait[1]) if wait else 30.0, preempt_mode=mode)

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
        listing = self._slurm.run("squeue", "--steps", "--noheader", "--jobs", str(self._job_id), "--format", "%i|%j")
        for line in listing.splitlines():
            step, _, title = line.strip().partition("|")
            if title == name:
                self._slurm.run("scancel", "--signal=KILL", step)

    def requeue(self, *, bad_nodes: Sequence[str]) -> str:
        """See Cluster."""
        self._slurm.run("scontrol", "requeue", str(self._job_id))
        if not bad_nodes:
            return "Slurm requeued the job; it starts again in about two minutes, unless the site says otherwise"
        names = ",".join(bad_nodes)
        try:
            # now that it is pending its owner may change this; the nodes it had are given back meanwhile
            self._slurm.run("scontrol", "update", f"JobId={self._job_id}", f"ExcNodeList={names}")
        except (ServiceError, NotPermittedError) as error:
            return f"Slurm requeued the job, but would not exclude {names}: {error.message}"
        return f"Slurm requeued the job without {names}; it starts again in about two minutes"

    def hold(self, reason: str) -> str:
        """See Cluster."""
        self._slurm.run("scontrol", "requeuehold", str(self._job_id))
        self._slurm.run("scontrol", "update", f"JobId={self._job_id}", f"Comment=resil: {reason}")
        return f"the job is held: {reason}; release it with: scontrol release {self._job_id}"

    def _find(self, nodes: Sequence[str]) -> Mapping[str, tuple[str, int]]:
        if not all(node in self._where for node in nodes):
            port = re.search(r"^SlurmdPort\s*=\s*(\d+)", self._slurm.run("scontrol", "show", "config"), re.MULTILINE)
            for line in self._slurm.run("scontrol", "-o", "show", "node", ",".join(nodes)).splitlines():
                node = fields(line)
                if "NodeName" in node:
                    own = node.get("Port") or (port[1] if port else "6818")
                    self._where[node["NodeName"]] = (node.get("NodeAddr") or node["NodeName"], int(own))
        return {node: self._where[node] for node in nodes if node in self._where}


class LocalCluster:
    """One host without Slurm: nothing can be requeued, and the only node is alive."""

    def record(self) -> JobRecord:
        """See Cluster."""
        return JobRecord(state="RUNNING", batch=False)

    def customs(self, partition: str) -> Customs:
        """See Cluster."""
        return Customs()

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
