"""What the engine may do. Pure: from what was read to a verdict in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_resil.recovery.store import Incident
from slurm_resil.slurm.job import JobRecord

REASON = "resil:"  # the engine's own drains begin with this
HOUR_S = 3600.0
_MARKS = "*~#!%$@^-"  # of states: silent, asleep, waking, going to sleep, in maintenance, to be rebooted, planned
_HELD = {"DRAIN", "DRAINED", "DRAINING", "MAINT", "MAINTENANCE", "FAIL", "FAILING"}
_HARMLESS = {"IDLE", "CLOUD", "RESERVED", "PLANNED", "DYNAMIC_NORM", "DYNAMIC_FUTURE", "POWERED_UP"}
_TAKEN = {"ALLOCATED", "MIXED"}
_BUSY = {*_TAKEN, "COMPLETING"}
_SLURMS_OWN = re.compile(r"(Not responding|Node unexpectedly rebooted)( \[[^\]]*\])?")


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


def refuse_job(record: JobRecord, uid: int, bad: Sequence[str]) -> str:
    """Why the peer may not have this job continued; empty if it may.

    Args:
        record: The job as Slurm knows it.
        uid: User id that the peer has proven.
        bad: Nodes that it calls bad.
    """
    if record.uid != uid:
        return f"job {record.id} does not belong to uid {uid}"
    if record.state != "RUNNING":
        return f"job {record.id} is {record.state}, not RUNNING"
    if not record.batch:
        return "only a batch job can be requeued"
    if not record.requeue:
        return "the job was submitted with --no-requeue"
    foreign = sorted(set(bad) - set(record.nodes))
    return f"{', '.join(foreign)} is no node of job {record.id}" if foreign else ""


def refuse_budget(incidents: Sequence[Incident], job: int, bad: Sequence[str], now_s: float, limits: Limits) -> str:
    """Why the budgets do not allow another continuation; empty if they do."""
    recent = sum(entry.tries for entry in incidents if entry.job == job and now_s - entry.created_s < HOUR_S)
    if recent >= limits.restarts_per_hour:
        return f"job {job} was continued {recent} times within an hour, the limit is {limits.restarts_per_hour}"
    drained = {name for e in incidents if now_s - e.created_s < limits.drains_in_s for name in e.bad}
    if len(drained | set(bad)) > limits.drains and bad:
        return f"{len(drained)} nodes were drained within {limits.drains_in_s:g} s: a person must look first"
    return ""


def states(record: Mapping[str, str]) -> set[str]:
    """State and flags of a node, upper case."""
    return {part.rstrip(_MARKS).upper() for part in record.get("State", "").split("+")} - {""}


def foreign(record: Mapping[str, str]) -> bool:
    """Whether somebody else has drained the node or set it down: hands off.

    What slurmctld itself says of a node that fell silent is nobody's.
    """
    reason, state = record.get("Reason", ""), states(record)
    if reason.startswith(REASON):
        return False
    if state & _HELD:
        return True
    return "DOWN" in state and bool(reason) and not _SLURMS_OWN.fullmatch(reason)


def silent(record: Mapping[str, str]) -> bool:
    """Whether Slurm itself calls the node dead."""
    return bool(states(record) & {"DOWN", "NOT_RESPONDING"}) or "*" in record.get("State", "")


def sound(record: Mapping[str, str]) -> bool:
    """Whether nothing but jobs keeps a node from being used."""
    found, marks = states(record), set(record.get("State", "")) & set(_MARKS)
    return bool(found) and found <= _HARMLESS | _BUSY and not marks


def busy(record: Mapping[str, str]) -> bool:
    """Whether a job runs on a node."""
    return bool(states(record) & _TAKEN)


def usable(record: Mapping[str, str]) -> bool:
    """Whether a node can stand in for another one now: idle, and nothing but harmless flags."""
    return "IDLE" in states(record) and sound(record) and not states(record) & _BUSY
