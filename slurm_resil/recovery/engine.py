"""The engine: hears requests from the owners of jobs, checks them against Slurm, and continues jobs on good nodes.

Requests are messages of :mod:`slurm_resil.comm.channel`, whose peer has proven its uid::

    {"ask": "register", "job": 7}
    {"ask": "continue", "job": 7, "bad_nodes": ["n3"], "reason": "node_loss", "level": "durable"}
    -> {"ok": true, "words": "...", "incident": 1}  or  {"ok": false, "permitted": false, "words": "..."}

The answer comes after the intent is written and before the first action, because the first action kills who asked.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
import time
from typing import Any

from slurm_resil.comm.auth import Auth
from slurm_resil.comm.channel import Channel, ChannelTimeoutError, Server
from slurm_resil.core import faults
from slurm_resil.core.errors import NotPermittedError, ResilError, TryAgainError
from slurm_resil.core.log import event
from slurm_resil.recovery import policy
from slurm_resil.recovery.actions import OVER, Continuation, dead
from slurm_resil.recovery.store import Incident, Store
from slurm_resil.slurm.job import JobRecord
from slurm_resil.slurm.scontrol import Commands

REQUEST_S = 10.0
REQUEST_BYTES = 256 << 10  # thousands of names of nodes
PER_HOST = 64  # connections from one host: every user of the cluster may connect
MAX_LOGGED = 500  # characters of what somebody asked
SWEEP_S = 3.0
RETRY_S = 10.0
TRIES = 3  # of one incident; while Slurm does not answer there are more, it may be a long outage
GIVE_UP_S = 3600.0
_REASON = re.compile(r"[a-z_]{1,40}")
log = logging.getLogger(__name__)


class Engine:
    """See the module.

    Args:
        slurm: Commands as SlurmUser or root.
        store: Database.
        mode: ``act``, or ``observe``: check and write down, do nothing, refuse.
        spares: Name of the reservation with the spares, empty if there is none.
        limits: Budgets.
    """

    def __init__(
        self, slurm: Commands, store: Store, *, mode: str, spares: str = "", limits: policy.Limits | None = None
    ) -> None:
        self._slurm, self._store, self._mode, self._spares = slurm, store, mode, spares
        self._limits = limits or policy.Limits()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, host: str, port: int, auth: Auth) -> Server:
        """Listen, and go on with what an earlier engine left.

        In this order: whoever cannot listen, because another engine does, must not act beside it.
        """
        left = [incident for incident in self._store.incidents() if not incident.outcome]
        server = Server(
            host, port, self._serve, auth=auth, limit_per_host=PER_HOST, max_bytes=REQUEST_BYTES, name="engine"
        )
        for incident in left if self._mode == "act" else ():
            self._begin(incident)
        threading.Thread(target=self._sweep, name="sweep", daemon=True).start()
        return server

    def stop(self) -> None:
        """End; what is not finished is gone on with by the next engine."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=5)

    # -- requests

    def _serve(self, channel: Channel) -> None:
        try:
            request = channel.recv(timeout_s=REQUEST_S)
        except ChannelTimeoutError:
            return
        incident: Incident | None = None
        try:
            if request.get("ask") == "register":
                self._register(channel.peer_uid, request)
                answer: dict[str, Any] = {"ok": True, "words": "the engine looks after the job"}
            elif request.get("ask") == "continue":
                incident, new = self._accept(channel.peer_uid, request)
                answer = {"ok": True, "incident": incident.id, "words": f"the engine continues it, #{incident.id}"}
                incident = incident if new else None
            else:
                raise NotPermittedError(f"{request.get('ask')!r} cannot be asked")
        except ResilError as error:
            asked = repr(request)[:MAX_LOGGED]
            event(
                log,
                "refused",
                level=logging.WARNING,
                uid=channel.peer_uid,
                request=asked,
                why=error.message[:MAX_LOGGED],
            )
            permitted = not isinstance(error, NotPermittedError)
            answer = {"ok": False, "permitted": permitted, "words": error.message}
        try:
            channel.send(answer)
        finally:
            if incident is not None:  # accepted is accepted, whether the peer still hears it or not
                self._begin(incident)

    def _job(self, request: dict[str, Any]) -> JobRecord:
        job = request.get("job")
        if not isinstance(job, int) or isinstance(job, bool) or job <= 0:
            raise NotPermittedError(f"{job!r} is no job id")
        return self._slurm.job(job)

    def _register(self, uid: int, request: dict[str, Any]) -> None:
        record = self._job(request)
        why = policy.refuse_job(record, uid, ())
        if why:
            raise NotPermittedError(why)
        self._store.register(record.id, uid, record.nodes)

    def _accept(self, uid: int, request: dict[str, Any]) -> tuple[Incident, bool]:
        record = self._job(request)
        bad, reason, level = request.get("bad_nodes"), request.get("reason"), request.get("level")
        if not isinstance(bad, list) or not all(isinstance(name, str) for name in bad):
            raise NotPermittedError(f"{bad!r} is no list of nodes")
        if not isinstance(reason, str) or not _REASON.fullmatch(reason) or not isinstance(level, str):
            raise NotPermittedError(f"{reason!r} is no reason, such as node_loss")
        if len(bad) > len(record.nodes) or len(set(bad)) < len(bad):
            raise NotPermittedError(f"{len(bad)} bad nodes, some of them twice, of {len(record.nodes)}")
        if record.preempted:
            reason = "preemption"  # whatever else its owner calls it: the nodes are somebody else's
        why = policy.refuse_job(record, uid, bad)
        if why:
            raise NotPermittedError(why)
        same = [entry for entry in self._store.incidents(job=record.id) if entry.restarts == record.restarts]
        if same and not same[0].outcome:
            return same[0], False
        healthy = [name for name in bad if not dead(self._slurm, name)]
        if healthy:
            # the owner's word alone drains nothing
            raise NotPermittedError(f"{', '.join(healthy)} answers: only a node that is dead by a second source is bad")
        why = policy.refuse_budget(self._store.incidents(), record.id, bad, time.time(), self._limits)
        if why:
            raise TryAgainError(why)
        if self._mode != "act":
            raise TryAgainError(
                f"the engine only observes; it would continue job {record.id} without {bad or 'change'}"
            )
        good = tuple(name for name in record.nodes if name not in bad)
        if same:  # it ended without an end of the attempt: that is still to be done
            found = self._store.reopen(same[0], bad=tuple(bad), good=good)
        else:
            found = self._store.open(
                job=record.id,
                uid=uid,
                restarts=record.restarts,
                bad=tuple(bad),
                good=good,
                reason=reason,
                level=level[:20],
            )
        faults.point("engine.accepted")
        return found

    # -- work

    def _begin(self, incident: Incident) -> None:
        thread = threading.Thread(target=self._work, args=(incident,), name=f"incident {incident.id}", daemon=True)
        self._threads = [entry for entry in self._threads if entry.is_alive()] + [thread]
        thread.start()

    def _work(self, incident: Incident) -> None:
        work = Continuation(self._slurm, self._store, incident, self._spares, self._stop.is_set)
        failures, give_up = 0, time.monotonic() + GIVE_UP_S
        while True:
            try:
                outcome = work.run()
                break
            except ResilError as error:
                event(log, "incident_failed", level=logging.ERROR, incident=incident.id, why=error.message)
                outcome = f"failed: {error.message}"
            except Exception:  # top of a thread
                log.exception("incident_crashed")
                outcome, failures = "failed: the engine's own fault, see its log", TRIES
            failures += 1
            if failures >= TRIES and (work.give_up() or time.monotonic() > give_up):
                break
            if self._stop.wait(RETRY_S):
                return
        faults.point("engine.ended")
        while True:
            try:
                self._store.end(incident.id, outcome)
                break
            except sqlite3.Error as error:  # the disk is full
                event(log, "not_written", level=logging.ERROR, incident=incident.id, why=str(error))
                if self._stop.wait(RETRY_S):
                    return
        event(log, "incident_ended", incident=incident.id, job=incident.job, outcome=outcome)

    def _sweep(self) -> None:
        """Look after registered jobs that Slurm itself has requeued: their launcher is gone."""
        while not self._stop.wait(SWEEP_S):
            try:
                registered = self._store.registered()
            except sqlite3.Error as error:
                event(log, "unknown", level=logging.ERROR, why=str(error))
                continue
            for job, (uid, nodes) in registered.items():
                try:
                    self._look_at(job, uid, nodes)
                except ResilError as error:
                    event(log, "unknown", level=logging.WARNING, job=job, why=error.message)
                except Exception:  # one job must not keep the others from being looked after
                    log.exception("sweep_crashed")

    def _look_at(self, job: int, uid: int, nodes: tuple[str, ...]) -> None:
        try:
            self._look(job, uid, nodes)
        except NotPermittedError:
            self._store.forget(job)  # as Slurm has

    def _look(self, job: int, uid: int, nodes: tuple[str, ...]) -> None:
        record = self._slurm.job(job)
        if record.state in OVER or record.uid != uid:
            self._store.forget(job)
            return
        if record.state == "RUNNING" and record.nodes != nodes:
            self._store.register(job, uid, record.nodes)
        if record.state != "PENDING" or record.reason != "BeginTime" or record.restarts == 0 or self._mode != "act":
            return
        bad = tuple(name for name in nodes if policy.silent(self._slurm.show("node", name)))
        why = policy.refuse_budget(self._store.incidents(), job, bad, time.time(), self._limits)
        if why:
            event(log, "refused", level=logging.WARNING, uid=uid, job=job, why=why)
            return
        good = tuple(name for name in nodes if name not in bad)
        reason = "node_loss" if bad else "requeued"
        # about the attempt that has ended, so that this and what its launcher asked for are one
        incident, new = self._store.open(
            job=job, uid=uid, restarts=record.restarts - 1, bad=bad, good=good, reason=reason, level="unknown"
        )
        if new:
            self._begin(incident)
