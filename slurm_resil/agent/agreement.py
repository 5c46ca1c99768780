"""The leader's half of the agreement on one iteration: pure, no clock and no socket of its own.

A proposal has an epoch, which rises even over leaders, and an iteration T above everything that any rank has
published. All nodes say yes: committed, and every rank saves at its first ``step`` at or above T, which is the same
for all because all were below. One says no, is lost or is silent: aborted, and the next proposal is higher. How much
above is computed: as many iterations as go by while a proposal makes its round, doubled with every refusal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurm_resil.agent.protocol import Propose

FIRST_ROUND_S = 0.1  # before one was measured
VOTE_WAIT_S = 5.0
MAX_DOUBLINGS = 5


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a node's ranks are.

    Attributes:
        newest: Newest iteration that one of them has published.
        rate: Iterations per second, 0 if unknown.
        at: When that was heard, seconds on the caller's clock.
    """

    newest: int = 0
    rate: float = 0.0
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of a proposal.

    Attributes:
        proposal: The proposal.
        commit: Whether all are for it.
        why: Who is against.
        too_low: Whether a rank was there already: a higher one can be proposed at once.
    """

    proposal: Propose
    commit: bool
    why: str = ""
    too_low: bool = False


class Agreement:
    """One proposal at a time.

    Args:
        epoch: Lower bound of the first epoch (the leader passes the wall clock in ms, so that a later leader is
            always above an earlier one).
    """

    def __init__(self, epoch: int = 1) -> None:
        self._epoch = epoch
        self._missing: set[int] = set()
        self._began = 0.0
        self._round_s = FIRST_ROUND_S
        self._refused = 0
        self._floor = 0
        self.open: Propose | None = None

    def raise_epoch(self, epoch: int) -> None:
        """Never use an epoch that somebody knows already."""
        self._epoch = max(self._epoch, epoch + 1)

    def target(self, progress: Iterable[Progress], now: float) -> int:
        """Iteration to propose: above all published ones, by what goes by in a round."""
        nodes = list(progress)
        rate = max((node.rate for node in nodes), default=0.0)
        newest = max((node.newest + int(node.rate * max(0.0, now - node.at)) for node in nodes), default=0)
        ahead = math.ceil(rate * self._round_s)
        if self._refused:
            ahead = max(1, ahead) << min(self._refused, MAX_DOUBLINGS)
        return max(newest, self._floor) + 1 + ahead

    def propose(
        self, progress: Mapping[int, Progress], now: float, *, stop: bool, deadline_s: float | None = None
    ) -> Propose:
        """Open a proposal to the nodes in ``progress`` (by node_rank)."""
        assert self.open is None
        iteration = self.target(progress.values(), now)
        self.open = Propose(epoch=self._epoch, iteration=iteration, stop=stop, deadline_s=deadline_s)
        self._epoch += 1
        self._missing = set(progress)
        self._began = now
        return self.open

    def vote(self, node: int, epoch: int, *, yes: bool, newest: int, now: float) -> Verdict | None:
        """Hear a vote; the verdict comes with the last yes or the first no."""
        if self.open is None or epoch != self.open.epoch or node not in self._missing:
            return None
        self._round_s = max(now - self._began, self._round_s / 2)
        if not yes and newest < self.open.iteration:
            return self._close(False, f"node {node} is not ready for it")
        if not yes:
            self._refused += 1
            self._floor = max(self._floor, newest)
            return self._close(False, f"node {node} is at iteration {newest}", too_low=True)
        self._missing.discard(node)
        if self._missing:
            return None
        self._refused = 0
        return self._close(True, "")

    def lost(self, node: int) -> Verdict | None:
        """Hear that a node cannot be reached: an open proposal is aborted."""
        if self.open is None:
            return None
        return self._close(False, f"node {node} is lost")

    def tick(self, now: float) -> Verdict | None:
        """Let time pass: silence is a no."""
        if self.open is None or now < self._began + VOTE_WAIT_S:
            return None
        silent = ", ".join(str(node) for node in sorted(self._missing))
        return self._close(False, f"no vote from node {silent} in {VOTE_WAIT_S} s")

    def abort(self, why: str) -> Verdict | None:
        """Abort an open proposal for a reason of the leader's own."""
        return self._close(False, why) if self.open is not None else None

    def _close(self, commit: bool, why: str, *, too_low: bool = False) -> Verdict:
        assert self.open is not None
        verdict = Verdict(proposal=self.open, commit=commit, why=why, too_low=too_low)
        self.open = None
        self._missing = set()
        return verdict
