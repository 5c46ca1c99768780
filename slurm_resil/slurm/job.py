"""A job as Slurm knows it, read so that nothing its owner wrote can pass for something that Slurm says.

``scontrol show job`` prints the job's name before its owner, and account, comment and paths between and after the rest,
none of them quoted: a job named ``x UserId=root(0)`` has two owners there. Here only columns are asked for that no user
writes: numbers, words of Slurm's own and names of nodes. The reason, which may hold any text of slurmctld's, is last.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from ClusterShell.NodeSet import NodeSet, NodeSetException

from slurm_resil.core.errors import ServiceError
from slurm_resil.core.model import EndTime, JobTimes

# all of them are in squeue of 22.05 to 26.05; a size of 0, from ":|", means that nothing is cut off
COLUMNS = (
    ("JobID", r"[0-9]+"),
    ("ArrayJobID", r"[0-9]+"),
    ("ArrayTaskID", r"[^|]*"),  # a number, a set of them while they wait together, or N/A
    ("UserID", r"[0-9]+"),
    ("State", r"[A-Z_]+"),
    ("RestartCnt", r"[0-9]+"),
    ("Requeue", r"[0-9]+"),
    ("BatchFlag", r"[0-9]+"),
    ("PriorityLong", r"[0-9]+"),
    ("TimeUsed", r"[^|]*"),
    ("TimeLimit", r"[^|]*"),
    ("StartTime", r"[^|]*"),
    ("EndTime", r"[^|]*"),
    ("PreemptTime", r"[^|]*"),
    ("Partition", r"[^|]*"),
    ("NodeList", r"[^|]*"),
    ("Reason", r".*"),
)
FORMAT = ",".join(f"{name}:|" for name, _ in COLUMNS)
_ROW = re.compile(r"\|".join(f"({pattern})" for _, pattern in COLUMNS) + r"\|")


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One job.

    Attributes:
        id: Job id.
        label: What Slurm's commands call it: ``8_2`` for a task of an array, because the last task to start has the
            array's own id, by which they mean all of its tasks.
        uid: Owner.
        state: Such as ``RUNNING``.
        restarts: How often it was requeued.
        requeue: Whether it may be.
        batch: Whether it has a batch script; others cannot be requeued.
        held: Whether it is held, by anybody.
        nodes: Nodes that it has, or had last if it is over.
        reason: Why it waits, such as ``BeginTime``.
        partition: Where it runs; several, with commas, while it waits.
        timed_out: Whether it has used up its time.
        times: When it began and when Slurm will end it.
    """

    id: int
    label: str = ""
    uid: int
    state: str
    restarts: int
    requeue: bool
    batch: bool
    held: bool
    nodes: tuple[str, ...]
    reason: str
    partition: str = ""
    timed_out: bool = False
    times: JobTimes = JobTimes()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", str(self.id))

    @property
    def preempted(self) -> bool:
        """Whether Slurm is taking it away for another one."""
        return self.times.preempted

    @property
    def cancelled(self) -> bool:
        """Whether somebody ended it who does not want it any more.

        COMPLETING alone does not tell that from preempted, requeued and timed out.
        """
        return self.state in ("COMPLETING", "CANCELLED") and not self.preempted and not self.timed_out

    def why_no_requeue(self) -> str:
        """Why Slurm would refuse to requeue it; empty if it would not."""
        if not self.batch:
            return "only batch jobs can be requeued, and this one was not submitted with sbatch"
        if not self.requeue:
            return "it was submitted with --no-requeue, or the site's JobRequeue is 0: add `#SBATCH --requeue`"
        return ""


def duration_s(text: str) -> float | None:
    """Read ``[days-][hours:]minutes:seconds``; None for anything else (``UNLIMITED``, ``Partition_Limit``...)."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d\d)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def read_times(*, limit: str, start: str, end: str, preempted: str) -> JobTimes:
    """Read Slurm's words for the times of a job, in Unix seconds (``SLURM_TIME_FORMAT=%s``)."""
    if limit == "UNLIMITED":
        found = EndTime.unlimited()
    elif end.isdigit():
        found = EndTime.known(datetime.fromtimestamp(int(end), UTC))
    else:
        found = EndTime.unknown()
    return JobTimes(start_s=float(start) if start.isdigit() else 0.0, end=found, preempted=preempted.isdigit())


def nodes_of(text: str) -> tuple[str, ...]:
    """Expand a host list; ``(null)`` is none.

    Raises:
        ServiceError: It is none.
    """
    try:
        return () if text in ("", "(null)", "N/A") else tuple(NodeSet(text))
    except NodeSetException as error:
        raise ServiceError(f"{text!r} is no list of nodes: {error}") from error


def read_job(text: str, job_id: int) -> JobRecord:
    """Read the answer to ``squeue --Format`` with :data:`FORMAT`; other tasks of an array may be in it.

    Raises:
        ServiceError: It does not hold exactly one such job, or anything else that is not understood.
    """
    rows = [_ROW.fullmatch(line) for line in text.splitlines()]
    if not all(rows):
        raise ServiceError(f"squeue's answer about job {job_id} is not understood: {text[:200]!r}", job=job_id)
    found = [row.groups() for row in rows if row is not None and int(row[1]) == job_id]
    if len(found) != 1:
        raise ServiceError(f"squeue knows {len(found)} jobs {job_id}", job=job_id)
    _, array, task, uid, state, restarts, requeue, batch, priority, used, limit, *times, partition, nodes, reason = (
        found[0]
    )
    start, end, preempted = times
    used_s, limit_s = duration_s(used), duration_s(limit)
    return JobRecord(
        id=job_id,
        label=f"{array}_{task}" if task.isdigit() else str(job_id),
        uid=int(uid),
        state=state,
        restarts=int(restarts),
        requeue=requeue != "0",
        batch=batch != "0",  # more than 1 after a failed launch
        held=state == "PENDING" and int(priority) == 0,
        nodes=nodes_of(nodes),
        reason=reason,
        partition=partition,
        timed_out=used_s is not None and limit_s is not None and used_s >= limit_s,
        times=read_times(limit=limit, start=start, end=end, preempted=preempted),
    )
