"""What the engine may do, from records as Slurm 22.05 writes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurm_resil.recovery import policy
from slurm_resil.recovery.store import Incident
from slurm_resil.slurm.job import JobRecord

JOB = JobRecord(
    id=7,
    uid=1001,
    state="RUNNING",
    restarts=0,
    requeue=True,
    batch=True,
    held=False,
    nodes=("n1", "n2", "n3"),
    reason="None",
)
NOW = 1_000_000.0


def incident(**fields: Any) -> Incident:
    common: dict[str, Any] = {"id": 1, "job": 7, "uid": 1001, "restarts": 0, "bad": (), "good": (), "spare": ()}
    common |= {
        "reason": "node_loss",
        "level": "durable",
        "created_s": NOW - 1,
        "tries": 1,
        "outcome": "",
        "ended_s": None,
    }
    return Incident(**(common | fields))


# -- whose job, which nodes


def test_the_owner_may_name_a_node_of_a_running_job() -> None:
    assert policy.refuse_job(JOB, 1001, ["n3"]) == ""
    assert policy.refuse_job(JOB, 1001, []) == ""


@pytest.mark.parametrize("uid", [1002, 0, -1, 100, 10011])
def test_nobody_else_may(uid: int) -> None:
    assert "does not belong" in policy.refuse_job(JOB, uid, ["n3"])


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING", "SUSPENDED", "COMPLETED", ""])
def test_only_a_running_job_is_continued(state: str) -> None:
    assert "not RUNNING" in policy.refuse_job(replace(JOB, state=state), 1001, [])


def test_no_requeue_is_obeyed() -> None:
    assert "--no-requeue" in policy.refuse_job(replace(JOB, requeue=False), 1001, [])


def test_what_has_no_script_cannot_be_started_again() -> None:
    assert "batch" in policy.refuse_job(replace(JOB, batch=False), 1001, [])


def test_nodes_of_others_cannot_be_named() -> None:
    assert policy.refuse_job(JOB, 1001, ["n3", "n9", "n8"]) == "n8, n9 is no node of job 7"


# -- budgets


def test_continuations_of_one_job_are_counted_for_an_hour() -> None:
    limits = policy.Limits(restarts_per_hour=2)
    recent = [incident(id=number, restarts=number, created_s=NOW - 60) for number in (1, 2)]
    assert "2 times within an hour" in policy.refuse_budget(recent, 7, [], NOW, limits)
    assert policy.refuse_budget(recent, 8, [], NOW, limits) == ""
    assert policy.refuse_budget(recent[:1], 7, [], NOW, limits) == ""
    assert policy.refuse_budget(recent, 7, [], NOW + policy.HOUR_S, limits) == ""
    assert policy.refuse_budget([incident(tries=2)], 7, [], NOW, limits)


def test_the_breaker_counts_nodes_of_all_jobs_once_each() -> None:
    limits = policy.Limits(drains=3, drains_in_s=600)
    past = [incident(job=1, bad=("n1", "n2")), incident(job=2, bad=("n2",))]
    assert policy.refuse_budget(past, 7, ["n3"], NOW, limits) == ""
    assert policy.refuse_budget(past, 7, ["n1", "n3"], NOW, limits) == ""
    assert "a person must look" in policy.refuse_budget(past, 7, ["n3", "n4"], NOW, limits)
    assert policy.refuse_budget(past, 7, [], NOW, limits) == ""  # nothing more would be drained
    assert policy.refuse_budget(past, 7, ["n3", "n4"], NOW + 600, limits) == ""


def test_one_ask_cannot_trip_over_the_breaker_by_itself() -> None:
    assert "a person must look" in policy.refuse_budget([], 7, ["a", "b"], NOW, policy.Limits(drains=1))


# -- states of nodes


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("IDLE", {"IDLE"}),
        ("IDLE*", {"IDLE"}),
        ("DOWN*+DRAIN", {"DOWN", "DRAIN"}),
        ("DOWN+DRAIN+NOT_RESPONDING", {"DOWN", "DRAIN", "NOT_RESPONDING"}),
        ("ALLOCATED+COMPLETING", {"ALLOCATED", "COMPLETING"}),
        ("idle+drain", {"IDLE", "DRAIN"}),
        ("IDLE~+CLOUD+POWERED_DOWN", {"IDLE", "CLOUD", "POWERED_DOWN"}),
        ("DOWN$", {"DOWN"}),
        ("MIXED#", {"MIXED"}),
        ("", set()),
    ],
)
def test_states_and_flags(state: str, expected: set[str]) -> None:
    assert policy.states({"State": state}) == expected


@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        ("IDLE", "", False),
        ("IDLE", "kernel update [root@2026-01-01T00:00:00]", False),  # a reason alone holds nothing
        ("IDLE+DRAIN", "kernel update [root@1]", True),
        ("IDLE+DRAIN", "", True),
        ("MIXED+DRAIN", "bad dimm; not resil: [root@1]", True),
        ("IDLE+DRAIN", "resil: job 7, node_loss [root@1]", False),
        ("IDLE+MAINTENANCE", "", True),
        ("IDLE+RESERVED+MAINTENANCE", "", True),
        ("IDLE+FAIL", "", True),
        ("DOWN*+DRAIN", "broken [root@1]", True),
        ("DOWN+DRAIN+NOT_RESPONDING", "resil: job 7, node_loss [root@1]", False),
        # Slurm's own word for a node that fell silent, and one that a person set down
        ("DOWN*", "Not responding [slurm@1]", False),
        ("DOWN+NOT_RESPONDING", "Not responding [slurm@1]", False),
        ("DOWN", "Node unexpectedly rebooted [slurm@1]", False),
        ("DOWN", "replacing the board [root@1]", True),
    ],
)
def test_what_somebody_else_holds(state: str, reason: str, expected: bool) -> None:
    assert policy.foreign({"State": state, "Reason": reason}) is expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("IDLE", False),
        ("ALLOCATED", False),
        ("IDLE+DRAIN", False),
        ("ALLOCATED*", True),
        ("IDLE*", True),
        ("DOWN", True),
        ("DOWN*+DRAIN", True),
        ("IDLE+NOT_RESPONDING", True),
        ("DOWN+DRAIN+NOT_RESPONDING", True),
        ("", False),  # nothing read, nothing concluded
    ],
)
def test_what_slurm_calls_dead(state: str, expected: bool) -> None:
    assert policy.silent({"State": state}) is expected
    assert policy.silent({}) is False


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("IDLE", True),
        ("IDLE+RESERVED", True),
        ("IDLE+CLOUD", True),
        ("IDLE*", False),
        ("IDLE+NOT_RESPONDING", False),
        ("IDLE+DRAIN", False),
        ("IDLE+COMPLETING", False),
        ("IDLE+MAINTENANCE", False),
        ("IDLE+MAINTENANCE+RESERVED", False),
        ("IDLE+FAIL", False),
        ("IDLE+PLANNED", True),
        ("IDLE~", False),
        ("IDLE+CLOUD+POWERED_DOWN", False),
        ("IDLE#", False),
        ("IDLE+POWERING_DOWN", False),
        ("IDLE+REBOOT_ISSUED", False),
        ("IDLE+REBOOT_REQUESTED", False),
        ("IDLE+INVALID_REG", False),
        ("IDLE+BLOCKED", False),
        ("ALLOCATED", False),
        ("MIXED", False),
        ("DOWN", False),
        ("DOWN+DRAIN+NOT_RESPONDING", False),
        ("UNKNOWN", False),
        ("", False),
    ],
)
def test_what_can_stand_in(state: str, expected: bool) -> None:
    assert policy.usable({"State": state}) is expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("ALLOCATED", True),
        ("MIXED+COMPLETING", True),
        ("IDLE+RESERVED", True),
        ("ALLOCATED*", False),
        ("ALLOCATED+DRAIN", False),
        ("MIXED+MAINTENANCE", False),
        ("DOWN", False),
        ("", False),
    ],
)
def test_what_the_job_may_have_again(state: str, expected: bool) -> None:
    assert policy.sound({"State": state}) is expected
