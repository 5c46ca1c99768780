"""What the engine does to Slurm, one action after the other, each read back; may be begun again at any point.

The order was found on live clusters: a job that is requeued while one of its nodes is dead stays COMPLETING until
that node is DOWN; a live node that is set DOWN comes back at once unless it is drained too; a job that was requeued
waits two minutes unless it is held, given a start time and released.

``Restarts`` grows when the old attempt is cleared away: an incident about attempt R is over once R + 1 runs.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence

from slurm_resil.core import faults
from slurm_resil.core.errors import NotPermittedError, ResilError, ServiceError
from slurm_resil.recovery import policy
from slurm_resil.recovery.store import Incident, Store
from slurm_resil.slurm.job import JobRecord, nodes_of
from slurm_resil.slurm.ping import gone
from slurm_resil.slurm.scontrol import Commands, fields

POLL_S = 0.2
PENDING_S = 180.0  # KillWait and the epilog are in it
RUNNING_S = 120.0
# slurmd refuses a job whose credential is not at least a second younger than the kill of its last attempt ("already
# killed, do not launch"), and the clocks of nodes differ
SETTLE_S = 2.5
FREE_S = 20.0  # until nodes have registered again after a restart of slurmctld
GUARD_MINUTES = 15
OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY")


def dead(slurm: Commands, name: str) -> bool:
    """Whether Slurm calls a node dead, or its slurmd is gone, or the whole host.

    Raises:
        ServiceError: That cannot be told.
    """
    record = slurm.show("node", name)
    if policy.silent(record):
        return True
    return gone(*slurm.slurmds([name])[name])


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
        record = self._slurm.job(self._incident.job)
        self._job = record.label
        if record.uid != self._incident.uid:
            return "the job id belongs to another user now: left alone"
        if self._settled(record):
            self._clear_guard()
            return self._settled(record)
        if record.held and not self._held_by_us():
            return "somebody else holds the job: left alone"
        bad = [name for name in self._incident.bad if self._drain(name)]
        excluded = sorted({*self._slurm.excluded(self._incident.job), *self._incident.bad})
        # before the job lets go of them: whoever waits for nodes would have them in the same second
        wanted = self._wanted_nodes(excluded)
        if not wanted or not self._make_guard(wanted):
            self._clear_guard()
            wanted = []
        self._take_down(bad)
        found = self._wait(("PENDING",), PENDING_S)
        if found is None or found.state != "PENDING" or self._settled(found):
            self._clear_guard()
            words = self._settled(found) if found else ""
            return words or f"the job is {found.state if found else 'gone'}: nothing to continue"
        time.sleep(SETTLE_S)
        if wanted and not self._still_there(wanted):
            self._clear_guard()
            wanted = []
        changes = [f"ReservationName={self._guard if wanted else ''}", f"ReqNodeList={','.join(wanted)}"]
        if excluded:
            changes.append(f"ExcNodeList={','.join(excluded)}")
        try:
            self._act("update", f"JobId={self._job}", *changes, "StartTime=now")
        finally:
            # whatever else went wrong
            self._release()
        if not wanted:
            return "released; it starts when there are nodes"
        found = self._wait(("RUNNING",), RUNNING_S)
        self._clear_guard()
        if found is None or found.state in OVER:
            return f"released, and now {found.state if found else 'gone'}"
        if found.state != "RUNNING":
            self._act("update", f"JobId={self._job}", "ReqNodeList=")
            return f"released, but it is {found.state} after {RUNNING_S:g} s; it takes any nodes now"
        return f"running on {','.join(found.nodes)}"

    def give_up(self) -> bool:
        """After a failure that stays: leave nothing that only the engine would undo; returns whether that is so."""
        clean = True
        for undo in (self._clear_guard, self._let_go):
            try:
                undo()
            except NotPermittedError:
                pass  # the job is gone, or not ours to touch
            except (ResilError, OSError, sqlite3.Error):
                clean = False
        return clean

    def _let_go(self) -> None:
        record = self._slurm.job(self._incident.job)
        self._job = record.label
        if record.held and self._held_by_us():
            self._release()

    def _release(self) -> None:
        """Release the job, also where it can no longer be written down: it must not stay held for ever."""
        line = None
        with contextlib.suppress(sqlite3.Error):
            line = self._store.audit(self._incident.id, f"release {self._job}", "begun")
        faults.point("engine.begun")
        self._slurm.run("scontrol", "release", self._job)
        faults.point("engine.acted")
        if line is not None:
            with contextlib.suppress(sqlite3.Error):
                self._store.finish(line, "done")

    # -- parts

    def _act(self, *argv: str) -> None:
        """Write an action down, do it, and write down how it went; one that cannot be written down is not begun."""
        line = self._store.audit(self._incident.id, " ".join(argv), "begun")
        faults.point("engine.begun")
        try:
            self._slurm.run("scontrol", *argv)
        except ResilError as error:
            self._store.finish(line, f"failed: {error.message}")
            raise
        faults.point("engine.acted")
        self._store.finish(line, "done")

    def _settled(self, record: JobRecord) -> str:
        """In words, whether the job went on after the attempt that this is about; empty if it did not yet."""
        ahead = record.restarts - self._incident.restarts
        if ahead == 1 and record.state == "RUNNING":
            return f"running on {','.join(record.nodes)}"
        return f"the job was started again {ahead} times meanwhile: nothing to continue" if ahead > 1 else ""

    def _held_by_us(self) -> bool:
        ours = (f"requeuehold {self._job}", f"hold {self._job}")
        return any(line["action"] in ours for line in self._store.trail(self._incident.id))

    def _drain(self, name: str) -> bool:
        """Drain a bad node; returns whether it is the engine's to take down."""
        record = self._slurm.show("node", name)
        why = ""
        if policy.foreign(record):
            why = "somebody else has drained it or set it down"
        elif not dead(self._slurm, name):
            why = "it answers"  # again: this may be long after the evidence
        if why:
            self._store.audit(self._incident.id, f"drain {name}", f"left alone: {why}")
            return False
        if "DRAIN" not in policy.states(record):
            reason = f"Reason={policy.REASON} job {self._job}, {self._incident.reason}"
            self._act("update", f"NodeName={name}", "State=DRAIN", reason)
        return True

    def _take_down(self, bad: Iterable[str]) -> None:
        record = self._slurm.job(self._incident.job)
        if record.restarts == self._incident.restarts and record.state == "RUNNING":
            self._act("requeuehold", self._job)
        elif record.state == "PENDING" and not record.held:
            self._act("hold", self._job)
        for name in bad:
            if policy.foreign(self._slurm.show("node", name)):
                self._store.audit(self._incident.id, f"down {name}", "left alone: somebody else has it by now")
                continue
            reason = f"Reason={policy.REASON} job {self._job}, {self._incident.reason}"
            self._act("update", f"NodeName={name}", "State=DOWN", reason)

    def _wait(self, wanted: tuple[str, ...], timeout_s: float) -> JobRecord | None:
        """The job once it is in a wanted state or over, or after the time; None if Slurm has forgotten it.

        Raises:
            ServiceError: The engine is to end, or Slurm has not answered once.
        """
        end, record = time.monotonic() + timeout_s, None
        while time.monotonic() < end:
            if self._stop():
                raise ServiceError("the engine was ended; it goes on when it is started again")
            try:
                record = self._slurm.job(self._incident.job)
            except NotPermittedError:
                return None
            except ServiceError:
                pass  # slurmctld may be restarting
            else:
                if record.state in (*wanted, *OVER) or self._settled(record):
                    return record
            time.sleep(POLL_S)
        if record is None:
            raise ServiceError(f"Slurm says nothing of job {self._job}")
        return record

    def _make_guard(self, wanted: Iterable[str]) -> bool:
        """Keep others off the nodes until the job has them; returns whether that worked."""
        there = self._reservations().get(self._guard)
        if there is not None and set(nodes_of(there)) == set(wanted):
            return True  # of an interrupted try
        self._clear_guard()
        try:
            self._act(
                "create",
                "reservation",
                f"ReservationName={self._guard}",
                f"Nodes={','.join(wanted)}",
                f"Users={self._incident.uid},root",
                "StartTime=now",
                f"Duration={GUARD_MINUTES}",
                "Flags=IGNORE_JOBS,FLEX,OVERLAP",
            )
        except NotPermittedError:
            raise
        except ServiceError:
            return False  # it is in the trail; the job goes on without
        return True

    def _wanted_nodes(self, excluded: Iterable[str]) -> list[str]:
        """Good nodes, and a spare for every bad one; none if one of them will not do."""
        incident = self._incident
        if incident.reason == "preemption":
            return []
        need = len(incident.bad)
        spare = list(incident.spare)
        if need and not spare:
            taken = {*incident.bad, *incident.good, *excluded}
            spare = [name for name in self._pool() if name not in taken][:need]
        if not incident.spare and spare:
            self._store.spares(incident.id, tuple(spare))
        if len(spare) < need:
            self._store.audit(incident.id, "choose a spare", f"{need} needed, {len(spare)} found: Slurm chooses")
            return []
        wanted = [*incident.good, *spare]
        odd = [name for name in wanted if not policy.sound(self._slurm.show("node", name))]
        return wanted if self._said(odd) else []

    def _still_there(self, wanted: Sequence[str]) -> bool:
        """Whether the nodes are free, now that the job is off them; Slurm may have requeued it long ago.

        After a restart of slurmctld nodes are unknown until they have registered again: that is waited for.
        """
        end = time.monotonic() + FREE_S
        while True:
            found = {name: self._slurm.show("node", name) for name in wanted}
            odd = [name for name, record in found.items() if not policy.usable(record)]
            taken = any(policy.busy(record) for record in found.values())
            if not odd or taken or time.monotonic() > end or self._stop():
                return self._said(odd)
            time.sleep(POLL_S)

    def _said(self, odd: Sequence[str]) -> bool:
        if odd:
            words = f"{', '.join(odd)} cannot be used: Slurm chooses"
            self._store.audit(self._incident.id, "take the old nodes", words)
        return not odd

    def _pool(self) -> list[str]:
        """Usable spares."""
        found = self._reservations().get(self._spares)
        if found is None:
            words = f"there is no reservation {self._spares}" if self._spares else "no reservation is configured"
            self._store.audit(self._incident.id, "look for spares", words)
            return []
        return [name for name in nodes_of(found) if policy.usable(self._slurm.show("node", name))]

    def _reservations(self) -> dict[str, str]:
        """Node list of every reservation; one that is not in it does not exist, where an error might mean anything."""
        lines = map(fields, self._slurm.run("scontrol", "-o", "show", "reservation").splitlines())
        return {line["ReservationName"]: line.get("Nodes", "") for line in lines if "ReservationName" in line}

    def _clear_guard(self) -> None:
        """Take the guard away, of this or of an interrupted try."""
        if self._guard in self._reservations():
            with contextlib.suppress(ResilError):  # a job that is over; deleting says what matters
                self._act("update", f"JobId={self._job}", "ReservationName=")
            self._act("delete", f"ReservationName={self._guard}")
