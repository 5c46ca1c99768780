"""A job as Slurm knows it, read so that nothing its owner wrote can pass for something that Slurm says.

``scontrol show job`` prints the job's name before its owner, and account, comment and paths between and after the rest,
none of them quoted: a job named ``x UserId=root(0)`` has two owners there. Here only columns are asked for that no user
writes: numbers, words of Slurm's own and names of nodes. The reason, which may hold any text of slurmctld's, is last.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ClusterShell.NodeSet import NodeSet, NodeSetException

from slurm_resil.core.errors import ServiceError

# all of them are in squeue of 22.05 to 26.05; a size of 0, from ":|", means that nothing is cut off
COLUMNS = (
    ("JobID", r"[0-9]+"),
    ("UserID", r"[0-9]+"),
    ("State", r"[A-Z_]+"),
    ("RestartCnt", r"[0-9]+"),
    ("Requeue", r"[0-9]+"),
    ("BatchFlag", r"[0-9]+"),
    ("PriorityLong", r"[0-9]+"),
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
        uid: Owner.
        state: Such as ``RUNNING``.
        restarts: How often it was requeued.
        requeue: Whether it may be.
        batch: Whether it has a batch script; others cannot be requeued.
        held: Whether it is held, by anybody.
        nodes: Nodes that it has, or had last if it is over.
        reason: Why it waits, such as ``BeginTime``.
    """

    id: int
    uid: int
    state: str
    restarts: int
    requeue: bool
    batch: bool
    held: bool
    nodes: tuple[str, ...]
    reason: str


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
    _, uid, state, restarts, requeue, batch, priority, nodes, reason = found[0]
    return JobRecord(
        id=job_id,
        uid=int(uid),
        state=state,
        restarts=int(restarts),
        requeue=requeue != "0",
        batch=batch != "0",  # more than 1 after a failed launch
        held=state == "PENDING" and int(priority) == 0,
        nodes=nodes_of(nodes),
        reason=reason,
    )
