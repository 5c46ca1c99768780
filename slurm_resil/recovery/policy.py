"""What the engine may do. Pure: from what was read to a verdict in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_resil.recovery.store import Incident

REASON = "resil:"  # the engine's own drains begin with this
HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Budgets of the engine.

    Attributes:
        restarts_per_hour: Continuations of one job.
        drains: Nodes that may be drained within ``drains_in_s`` before a person must look (the breaker).
    """

    restarts_per_hour: int = 20
    drains: int = 4
    drains_in_s: float = 600.0


def refuse_job(record: Mapping[str, str], uid: int, bad: Sequence[str], nodes: Sequence[str]) -> str:
    """Why the peer may not have this job continued; empty if it may.

    Args:
        record: Slurm's record of the job.
        uid: User id that the peer has proven.
        bad: Nodes that it calls bad.
        nodes: Nodes of the job.
    """
    owner = record.get("UserId", "").rpartition("(")[2].rstrip(")")
    if owner != str(uid):
        return f"job {record.get('JobId')} does not belong to uid {uid}"
    if record.get("JobState") != "RUNNING":
        return f"job {record.get('JobId')} is {record.get('JobState')}, not RUNNING"
    if record.get("Requeue") == "0":
        return "the job was submitted with --no-requeue"
    foreign = sorted(set(bad) - set(nodes))
    return f"{', '.join(foreign)} is no node of job {record.get('JobId')}" if foreign else ""


def refuse_budget(incidents: Sequence[Incident], job: int, bad: Sequence[str], now_s: float, limits: Limits) -> str:
    """Why the budgets do not allow another continuation; empty if they do."""
    recent = [entry for entry in incidents if entry.job == job and now_s - entry.created_s < HOUR_S]
    if len(recent) >= limits.restarts_per_hour:
        return f"job {job} was continued {len(recent)} times within an hour, the limit is {limits.restarts_per_hour}"
    drained = {name for e in incidents if now_s - e.created_s < limits.drains_in_s for name in e.bad}
    if len(drained | set(bad)) > limits.drains and bad:
        return f"{len(drained)} nodes were drained within {limits.drains_in_s:g} s: a person must look first"
    return ""


def states(record: Mapping[str, str]) -> set[str]:
    """State and flags of a node, upper case."""
    return {part.rstrip("*").upper() for part in record.get("State", "").split("+")}


def foreign(record: Mapping[str, str]) -> bool:
    """Whether somebody else has drained the node or set it down: hands off."""
    reason = record.get("Reason", "")
    held = bool(states(record) & {"DRAIN", "DRAINED", "DRAINING", "MAINT", "FAIL"})
    return held and not reason.startswith(REASON)


def silent(record: Mapping[str, str]) -> bool:
    """Whether Slurm itself calls the node dead."""
    return "DOWN" in states(record) or "NOT_RESPONDING" in states(record) or "*" in record.get("State", "")


def usable(record: Mapping[str, str]) -> bool:
    """Whether a node can stand in for another one now."""
    bad = {"DRAIN", "DOWN", "ALLOCATED", "MIXED", "COMPLETING", "NOT_RESPONDING", "MAINT", "FAIL", "UNKNOWN"}
    return "IDLE" in states(record) and not states(record) & bad and "*" not in record.get("State", "")
