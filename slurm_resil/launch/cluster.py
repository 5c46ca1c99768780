"""What the launcher asks of Slurm, and the same for one host without Slurm."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slurm_resil.core.errors import NotPermittedError, ServiceError, UsageError
from slurm_resil.slurm.job import JobRecord
from slurm_resil.slurm.ping import reachable
from slurm_resil.slurm.scontrol import Commands


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

    def kill_step(self, name: str, wanted: Callable[[], bool]) -> None:
        """Kill the step with this name by SIGKILL; ``wanted``: whether it is still there, and not another one."""
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
        return self._slurm.job(self._job_id)

    def customs(self, partition: str) -> Customs:
        """See Cluster."""
        wait = re.match(r"\d+", self._slurm.config().get("KillWait", ""))
        mode = self._slurm.show("partition", partition).get("PreemptMode", "")
        return Customs(kill_wait_s=float(wait[0]) if wait else 30.0, preempt_mode=mode)

    def addresses(self, nodes: Sequence[str]) -> Mapping[str, str]:
        """See Cluster."""
        return {node: address for node, (address, _) in self._find(nodes).items()}

    def alive(self, nodes: Sequence[str]) -> Mapping[str, bool]:
        """See Cluster."""
        where = self._find(nodes)
        found: dict[str, bool] = {}

        def ask(node: str) -> None:
            found[node] = reachable(*where[node])

        threads = [threading.Thread(target=ask, args=(node,), daemon=True) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def kill_step(self, name: str, wanted: Callable[[], bool]) -> None:
        """See Cluster."""
        job = self.record().label
        listing = self._slurm.run("squeue", "--steps", "--noheader", "--jobs", job, "--format", "%i|%j")
        for line in listing.splitlines():
            step, _, title = line.strip().partition("|")
            # other tasks of an array have steps of the same name
            if title == name and step.startswith(f"{job}.") and wanted():
                # by slurmctld: at scancel's own request a slurmstepd starts a watch over the end of its tasks, and
                # where they end at that moment, waits a minute for the watch's end and has the node drained
                self._slurm.run("scancel", "--ctld", "--signal=KILL", step)

    def requeue(self, *, bad_nodes: Sequence[str]) -> str:
        """See Cluster."""
        job = self.record().label
        self._slurm.run("scontrol", "requeue", job)
        if not bad_nodes:
            return "Slurm requeued the job; it starts again in about two minutes, unless the site says otherwise"
        names = ",".join(bad_nodes)
        try:
            # now that it is pending its owner may change this; the nodes it had are given back meanwhile
            self._slurm.run("scontrol", "update", f"JobId={job}", f"ExcNodeList={names}")
        except (ServiceError, NotPermittedError) as error:
            return f"Slurm requeued the job, but would not exclude {names}: {error.message}"
        return f"Slurm requeued the job without {names}; it starts again in about two minutes"

    def hold(self, reason: str) -> str:
        """See Cluster."""
        job = self.record().label
        self._slurm.run("scontrol", "requeuehold", job)
        self._slurm.run("scontrol", "update", f"JobId={job}", f"Comment=resil: {reason}")
        return f"the job is held: {reason}; release it with: scontrol release {job}"

    def _find(self, nodes: Sequence[str]) -> Mapping[str, tuple[str, int]]:
        if not all(node in self._where for node in nodes):
            self._where |= self._slurm.slurmds(nodes)
        return {node: self._where[node] for node in nodes}


class LocalCluster:
    """One host without Slurm: nothing can be requeued, and the only node is alive."""

    def record(self) -> JobRecord:
        """See Cluster."""
        return JobRecord(
            id=0,
            uid=os.getuid(),
            state="RUNNING",
            restarts=0,
            requeue=False,
            batch=False,
            held=False,
            nodes=(),
            reason="",
        )

    def customs(self, partition: str) -> Customs:
        """See Cluster."""
        return Customs()

    def addresses(self, nodes: Sequence[str]) -> Mapping[str, str]:
        """See Cluster."""
        return dict.fromkeys(nodes, "127.0.0.1")

    def alive(self, nodes: Sequence[str]) -> Mapping[str, bool]:
        """See Cluster."""
        return dict.fromkeys(nodes, True)

    def kill_step(self, name: str, wanted: Callable[[], bool]) -> None:
        """See Cluster."""
        raise UsageError(f"there is no step {name} without Slurm")

    def requeue(self, *, bad_nodes: Sequence[str]) -> str:
        """See Cluster."""
        raise NotPermittedError("there is no Slurm to requeue anything")

    def hold(self, reason: str) -> str:
        """See Cluster."""
        raise NotPermittedError(f"there is no Slurm to hold anything: {reason}")
