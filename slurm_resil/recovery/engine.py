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
import threading
import time
from typing import Any

from slurm_resil.comm.auth import Auth
from slurm_resil.comm.channel import Channel, ChannelTimeoutError, Server
from slurm_resil.core.errors import NotPermittedError, ResilError, TryAgainError
from slurm_resil.core.log import event
from slurm_resil.recovery import policy
from slurm_resil.recovery.actions import Continuation, nodes_of
from slurm_resil.recovery.store import Incident, Store
from slurm_resil.slurm.ping import reachable
from slurm_resil.slurm.scontrol import Commands

REQUEST_S = 10.0
SWEEP_S = 3.0
RETRY_S = 10.0
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
        self._lock = threading.Lock()
        self._known: dict[int, tuple[int, tuple[str, ...]]] = {}  # job -> owner, nodes when it was last seen running
        self._threads: list[threading.Thread] = []

    def start(self, host: str, port: int, auth: Auth) -> Server:
        """Listen, and go on with what an earlier engine left."""
        for incident in self._store.incidents():
            if not incident.outcome:
                self._begin(incident)
        threading.Thread(target=self._sweep, name="sweep", daemon=True).start()
        return Server(host, port, self._serve, auth=auth, name="engine")

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
            event(log, "refused", level=logging.WARNING, uid=channel.peer_uid, request=request, why=error.message)
            permitted = not isinstance(error, NotPermittedError)
            answer = {"ok": False, "permitted": permitted, "words": error.message}
        try:
            channel.send(answer)
        finally:
            if incident is not None:  # accepted is accepted, whether the peer still hears it or not
                self._begin(incident)

    def _job(self, request: dict[str, Any]) -> tuple[int, dict[str, str]]:
        job = request.get("job")
        if not isinstance(job, int) or isinstance(job, bool) or job <= 0:
            raise NotPermittedError(f"{job!r} is no job id")
        return job, self._slurm.show("job", str(job))

    def _register(self, uid: int, request: dict[str, Any]) -> None:
        job, record = self._job(request)
        nodes = nodes_of(record.get("NodeList", ""))
        why = policy.refuse_job(record, uid, (), nodes)
        if why:
            raise NotPermittedError(why)
        with self._lock:
            self._known[job] = (uid, nodes)

    def _accept(self, uid: int, request: dict[str, Any]) -> tuple[Incident, bool]:
        job, record = self._job(request)
        bad, reason, level = request.get("bad_nodes"), request.get("reason"), request.get("level")
        if not isinstance(bad, list) or not all(isinstance(name, str) for name in bad):
            raise NotPermittedError(f"{bad!r} is no list of nodes")
        if not isinstance(reason, str) or not _REASON.fullmatch(reason) or not isinstance(level, str):
            raise NotPermittedError(f"{reason!r} is no reason, such as node_loss")
        nodes = nodes_of(record.get("NodeList", ""))
        why = policy.refuse_job(record, uid, bad, nodes)
        if why:
            raise NotPermittedError(why)
        healthy = [name for name in bad if not self._dead(name)]
        if healthy:
            # the owner's word alone drains nothing
            raise NotPermittedError(f"{', '.join(healthy)} answers: only a node that is dead by a second source is bad")
        why = policy.refuse_budget(self._store.incidents(), job, bad, time.time(), self._limits)
        if why:
            raise TryAgainError(why)
        if self._mode != "act":
            raise TryAgainError(f"the engine only observes; it would continue job {job} without {bad or 'any change'}")
        return self._store.open(
            job=job,
            uid=uid,
            restarts=int(record.get("Restarts", "0")),
            bad=tuple(bad),
            good=tuple(name for name in nodes if name not in bad),
            reason=reason,
            level=level[:20],
        )

    def _dead(self, name: str) -> bool:
        record = self._slurm.show("node", name)
        if policy.silent(record):
            return True
        port = record.get("Port") or "6818"
        return not reachable(record.get("NodeAddr") or name, int(port))

    # -- work

    def _begin(self, incident: Incident) -> None:
        thread = threading.Thread(target=self._work, args=(incident,), name=f"incident {incident.id}", daemon=True)
        self._threads = [entry for entry in self._threads if entry.is_alive()] + [thread]
        thread.start()

    def _work(self, incident: Incident) -> None:
        for again in range(3):
            try:
                outcome = Continuation(self._slurm, self._store, incident, self._spares, self._stop.is_set).run()
            except ResilError as error:
                outcome = f"failed: {error.message}"
                event(log, "incident_failed", level=logging.ERROR, incident=incident.id, why=error.message, again=again)
                if self._stop.wait(RETRY_S):
                    return
                continue
            except Exception:  # top of a thread
                log.exception("incident_crashed")
                outcome = "failed: the engine's own fault, see its log"
            break
        self._store.end(incident.id, outcome)
        event(log, "incident_ended", incident=incident.id, job=incident.job, outcome=outcome)

    def _sweep(self) -> None:
        """Look after registered jobs that Slurm itself has requeued: their launcher is gone."""
        while not self._stop.wait(SWEEP_S):
            with self._lock:
                known = dict(self._known)
            for job, (uid, nodes) in known.items():
                try:
                    self._look(job, uid, nodes)
                except NotPermittedError:
                    with self._lock:
                        self._known.pop(job, None)  # Slurm has forgotten it
                except ResilError as error:
                    event(log, "unknown", level=logging.WARNING, job=job, why=error.message)

    def _look(self, job: int, uid: int, nodes: tuple[str, ...]) -> None:
        record = self._slurm.show("job", str(job))
        state = record.get("JobState", "")
        if state in ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"):
            with self._lock:
                self._known.pop(job, None)
        if state != "PENDING" or record.get("Reason") != "BeginTime" or self._mode != "act":
            return
        restarts = int(record.get("Restarts", "0"))
        bad = tuple(name for name in nodes if policy.silent(self._slurm.show("node", name)))
        good = tuple(name for name in nodes if name not in bad)
        reason = "node_loss" if bad else "requeued"
        incident, new = self._store.open(
            job=job, uid=uid, restarts=restarts, bad=bad, good=good, reason=reason, level="unknown"
        )
        if new:
            self._begin(incident)
