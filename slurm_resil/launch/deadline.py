"""Asks Slurm for the job's end and says when a checkpoint must begin. Unknown takes no action."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from slurm_resil.core.costs import Costs
from slurm_resil.core.errors import ResilError
from slurm_resil.core.log import event
from slurm_resil.core.model import JobTimes, Notice, NoticeKind
from slurm_resil.launch.cluster import Cluster
from slurm_resil.watch.deadline import due, lead_s

POLL_FAR_S = 30.0
POLL_NEAR_S = 5.0
NEAR_S = 120.0  # from the moment at which a checkpoint would begin
CLOSER_S = 1.0
PARTS = ("save", "drain")
log = logging.getLogger(__name__)


class DeadlineWatch:
    """Call it often: it asks Slurm seldom, and lives on the last answer while Slurm does not answer.

    Args:
        cluster: Slurm.
        costs: Measured times.
        override_s: Lead that the user wants, seconds.
        clock: Unix time, seconds.
    """

    def __init__(
        self, cluster: Cluster, costs: Costs, override_s: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._cluster, self._costs, self._override_s, self._clock = cluster, costs, override_s, clock
        self._times: JobTimes | None = None
        self._next_s = 0.0
        self._said: dict[NoticeKind, float] = {}

    def __call__(self, *, hurry: bool = False) -> list[Notice]:
        """Notices that are due now; each kind is given once, and again when its deadline has come closer.

        Args:
            hurry: Ask Slurm now: somebody has heard that the job must go, and not by when.
        """
        now = self._clock()
        if hurry or now >= self._next_s:
            self._ask(now)
        notice = due(self._times, now, self._lead()) if self._times is not None else None
        if notice is None or notice.deadline_s is None:
            return []
        if notice.deadline_s > self._said.get(notice.kind, math.inf) - CLOSER_S:
            return []
        self._said[notice.kind] = notice.deadline_s
        return [notice]

    def _lead(self) -> float:
        found = tuple(value for value in map(self._costs.p99, PARTS) if value is not None)
        times = self._times
        limit = times.end.at.timestamp() - times.start_s if times and times.end.at and times.start_s else None
        # half the story measured is not enough to undercut the first guess
        return lead_s(found if len(found) == len(PARTS) else (), limit_s=limit, override_s=self._override_s)

    def _ask(self, now: float) -> None:
        try:
            times = self._cluster.record().times
        except ResilError as error:
            event(log, "deadline_unknown", level=logging.WARNING, error=str(error))
        else:
            if times.end.kind != "unknown":
                self._times = times
        end = self._times.end.at.timestamp() if self._times and self._times.end.at else now + POLL_FAR_S
        near = end - self._lead() - now < NEAR_S
        self._next_s = now + (POLL_NEAR_S if near else POLL_FAR_S)
