"""A rank's half of the agreement, on the control page: publish an iteration, then look whether something is asked.

``Seat.words``, ``Seat.iteration`` (index of this rank's word) are public, so that the caller's hot path is two
statements::

    words[seat.iteration] = i
    if words[PROPOSAL]:
        order = seat.look(i)
"""

from __future__ import annotations

import enum
import os
import time
from dataclasses import dataclass

from slurm_resil.core import control as c
from slurm_resil.core.model import Levels

DECISION_WAIT_S = 30.0  # for the decision on an open proposal
_POLL_S = 0.0005


class Kind(enum.Enum):
    """What a rank has to do."""

    NOTHING = enum.auto()
    SAVE = enum.auto()
    SAVE_AND_STOP = enum.auto()


@dataclass(frozen=True)
class Order:
    """What to do at this iteration; ``sure`` is False when no decision came in time (saving is then harmless)."""

    kind: Kind
    epoch: int = 0
    sure: bool = True


NOTHING = Order(Kind.NOTHING)


class Seat:
    """One rank's place on the page.

    Args:
        page: Control page.
        local_rank: Rank on this node.
        decision_wait_s: Longest wait for a decision at the proposed iteration, seconds.
    """

    def __init__(self, page: c.ControlPage, local_rank: int, *, decision_wait_s: float = DECISION_WAIT_S) -> None:
        self.page = page
        self.words = page.words
        self.iteration = page.block(local_rank) + c.ITERATION
        self._block = page.block(local_rank)
        self._wait_s = decision_wait_s
        self._done = 0  # epoch that needs nothing more from this rank
        self.words[self._block + c.FENCED] = int(c.register_barriers())
        self.words[self._block + c.PID] = os.getpid()

    def look(self, iteration: int) -> Order:
        """Act on the proposal that is on the page, after ``iteration`` was published.

        Waits at the proposed iteration while the proposal is open, for a bounded time. The iteration at which all
        ranks save is the first one at or above the proposed one.
        """
        deadline = None
        while True:
            epoch, target, decision, stop = self._read()
            if not target or epoch == self._done or iteration < target:
                break
            if decision == c.ABORT:
                break
            if decision == c.COMMIT:
                self._done = epoch
                self._waiting(0)
                return Order(Kind.SAVE_AND_STOP if stop else Kind.SAVE, epoch)
            now = time.monotonic()
            if deadline is None:
                deadline = now + self._patience(stop=bool(stop))
                self._waiting(epoch)
            elif now >= deadline:
                self._done = epoch
                self._waiting(0)
                return Order(Kind.SAVE, epoch, sure=False)
            time.sleep(_POLL_S)
        if deadline is not None:
            self._waiting(0)
        return NOTHING

    def acted(self, iteration: int) -> None:
        """Say that this rank has saved at an iteration, or tried to."""
        self.words[self._block + c.SAVED] = iteration

    @property
    def stop_asked(self) -> bool:
        """Whether an open or committed proposal asks for a stop."""
        words = self.words
        return bool(words[c.PROPOSAL] and words[c.STOP] and words[c.DECISION] != c.ABORT)

    @property
    def sealed_all(self) -> int:
        """Newest iteration that all ranks of the run have sealed."""
        return self.words[c.SEALED_ALL]

    @property
    def levels(self) -> Levels:
        """Newest iteration of the run at each level."""
        words = self.words
        durable = words[c.DURABLE]
        return Levels(local=words[c.SEALED_ALL], protected=max(words[c.PROTECTED], durable), durable=durable)

    @property
    def given_up(self) -> int:
        """Newest iteration that will never be sealed by all."""
        return self.words[c.FAILED]

    def time_left(self) -> float | None:
        """Seconds to the deadline of the stop; None if there is none."""
        deadline_ms = self.words[c.DEADLINE]
        return deadline_ms / 1000 - time.time() if deadline_ms else None

    def _patience(self, *, stop: bool) -> float:
        left = self.time_left() if stop else None
        return max(self._wait_s, left) if left is not None else self._wait_s

    def _waiting(self, epoch: int) -> None:
        self.words[self._block + c.WAITING] = epoch

    def _read(self) -> tuple[int, int, int, int]:
        """Read epoch, proposal, decision and stop that belong together."""
        words = self.words
        while True:
            epoch = words[c.EPOCH]
            target, decision, stop = words[c.PROPOSAL], words[c.DECISION], words[c.STOP]
            if words[c.EPOCH] == epoch:
                return epoch, target, decision, stop
