"""What the engine does to Slurm, one action after the other, each read back; may be begun again at any point.

The order was found on live clusters: a job that is requeued while one of its nodes is dead stays COMPLETING until
that node is DOWN; a live node that is set DOWN comes back at once unless it is drained too; a job that was requeued
waits two minutes unless it is held, given a start time and released.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ClusterShell.NodeSet import NodeSet

from slurm_resil.core.errors import NotPermittedError, ResilError, ServiceError
from slurm_resil.recovery import policy
from slurm_resil.recovery.store import Incident, Store
from slurm_resil.slurm.scontrol import Commands

POLL_S = 0.2
PENDING_S = 180.0  # KillWait and the epilog are in it
RUNNING_S = 120.0
# slurmd refuses a job whose credential is not at least a second younger than the kill of its last attempt ("already
# killed, do not launch"), and the clocks of nodes differ
SETTLE_S = 2.5
GUARD_MINUTES = 15


def nodes_of(text: str) -> tuple[str, ...]:
    """Expand a host list; ``(null)`` is none."""
    return () if text in ("", "(null)") else tuple(NodeSet(text))


class Continuation:
    """Continues one job.

    Args:
        slurm: Commands, as a user who may do all this.
        store: Audit trail.
        incident: What is to be done.
        spares: Name of the reservation that holds the spares, empty if there is none.
        stop: Says that the engine ends: whoever starts next goes on.
    """

    def __init__(
        self, slurm: Commands, store: Store, incident: Incident, spares: str, stop: Callable[[], bool]
    ) -> None:
        self._slurm, self._store, self._incident, self._spares, self._stop = slurm, store, incident, spares, stop
        self._job = str(incident.job)
        self._guard = f"resil_{incident.job}"

    def run(self) -> str:
        """Do it; returns the outcome in words.

        Raises:
            ResilError: It cannot be done; the job is as it is, and the words are for a person.
        """
        bad = [name for name in self._incident.bad if self._drain(name)]
        self._take_down(bad)
        state = self._wait(("PENDING",), PENDING_S)
        if state != "PENDING":
            return f"the job is {state}: nothing to continue"
        self._clear_guard()
        time.sleep(SETTLE_S)
        wanted = self._wanted_nodes()
        if wanted:
            users = f"{self._owner()},root"
            self._act(
                "create",
                "reservation",
                f"ReservationName={self._guard}",
                f"Nodes={','.join(wanted)}",
                f"Users={users}",
                "StartTime=now",
                f"Duration={GUARD_MINUTES}",
                "Flags=IGNORE_JOBS,FLEX,OVERLAP",
            )
        changes = [f"ReservationName={self._guard if wanted else ''}", f"ReqNodeList={','.join(wanted)}"]
        if self._incident.bad:
            changes.append(f"ExcNodeList={','.join(self._incident.bad)}")
        try:
            self._act("update", f"JobId={self._job}", *changes, "StartTime=now")
        finally:
            # whatever else went wrong, it must not stay held for ever
            self._act("release", self._job)
        if not wanted:
            return "released; it starts when there are nodes"
        state = self._wait(("RUNNING",), RUNNING_S)
        self._clear_guard()
        if state != "RUNNING":
            self._act("update", f"JobId={self._job}", "ReqNodeList=")
            return f"released, but it is {state} after {RUNNING_S:g} s; it takes any nodes now"
        return f"running on {self._slurm.show('job', self._job).get('NodeList')}"

    # -- parts

    def _act(self, *argv: str) -> None:
        try:
            self._slurm.run("scontrol", *argv)
        except ResilError as error:
            self._store.audit(self._incident.id, " ".join(argv), f"failed: {error.message}")
            raise
        self._store.audit(self._incident.id, " ".join(argv), "done")

    def _drain(self, name: str) -> bool:
        if policy.foreign(self._slurm.show("node", name)):
            self._store.audit(self._incident.id, f"drain {name}", "left alone: somebody else has drained it")
            return False
        reason = f"Reason={policy.REASON} job {self._job}, {self._incident.reason}"
        self._act("update", f"NodeName={name}", "State=DRAIN", reason)
        return True

    def _take_down(self, bad: Iterable[str]) -> None:
        record = self._slurm.show("job", self._job)
        restarts, state = int(record.get("Restarts", "0")), record.get("JobState")
        if restarts == self._incident.restarts and state == "RUNNING":
            self._act("requeuehold", self._job)
        elif state == "PENDING" and record.get("Reason") != "JobHeldUser" and record.get("Priority") != "0":
            self._act("hold", self._job)
        for name in bad:
            reason = f"Reason={policy.REASON} job {self._job}, {self._incident.reason}"
            self._act("update", f"NodeName={name}", "State=DOWN", reason)

    def _wait(self, wanted: tuple[str, ...], timeout_s: float) -> str:
        end, state = time.monotonic() + timeout_s, "UNKNOWN"
        over = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "DEADLINE")
        while time.monotonic() < end:
            if self._stop():
                raise ServiceError("the engine was ended; it goes on when it is started again")
            try:
                state = self._slurm.show("job", self._job).get("JobState", "UNKNOWN")
            except NotPermittedError:
                return "gone"
            except ServiceError:
                state = "UNKNOWN"  # slurmctld may be restarting
            if state in wanted or state in over:
                break
            time.sleep(POLL_S)
        return state

    def _owner(self) -> str:
        return self._slurm.show("job", self._job).get("UserId", "").partition("(")[0]

    def _wanted_nodes(self) -> list[str]:
        """Good nodes, and a spare for every bad one; none if they are somebody else's by now."""
        incident = self._incident
        if incident.reason == "preemption":
            return []
        need = len(incident.bad)
        spare = list(incident.spare) or [name for name in self._pool() if name not in (*incident.bad, *incident.good)]
        spare = spare[:need]
        if not incident.spare and spare:
            self._store.spares(incident.id, tuple(spare))
        if len(spare) < need:
            self._store.audit(incident.id, "choose a spare", f"{need} needed, {len(spare)} found: Slurm chooses")
            return []
        wanted = [*incident.good, *spare]
        odd = [name for name in wanted if not policy.usable(self._slurm.show("node", name))]
        if odd:
            self._store.audit(incident.id, "take the old nodes", f"{', '.join(odd)} cannot be used: Slurm chooses")
            return []
        return wanted

    def _pool(self) -> list[str]:
        """Usable spares."""
        if not self._spares:
            return []
        names = nodes_of(self._slurm.show("reservation", self._spares).get("Nodes", ""))
        return [name for name in names if policy.usable(self._slurm.show("node", name))]

    def _clear_guard(self) -> None:
        """Take the guard away, of this or of an interrupted try."""
        listing = self._slurm.run("scontrol", "-o", "show", "reservation")
        if f"ReservationName={self._guard} " in listing:
            self._act("update", f"JobId={self._job}", "ReservationName=")
            self._act("delete", f"ReservationName={self._guard}")
