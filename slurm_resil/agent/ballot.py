"""The agent's half of the agreement, on the control page.

A proposal is written, then (after a full barrier for both sides) the iterations are read: a rank that had published
one at or above T is seen here, any other will see the proposal before it passes T. See core.control for the race.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from slurm_resil.agent.protocol import Decide, Propose, Vote
from slurm_resil.core import control as c
from slurm_resil.core import faults
from slurm_resil.core.errors import ServiceError
from slurm_resil.core.log import event

log = logging.getLogger(__name__)


class Ballot:
    """The node's vote.

    Args:
        page: Control page; this process is its only writer, the ranks' blocks apart.
        barrier: Full memory barrier on all threads of the ranks and this one; default: by the kernel.
    """

    def __init__(self, page: c.ControlPage, *, barrier: Callable[[], None] | None = None) -> None:
        self._words = page.words
        self._barrier = barrier or self._fence
        self._fenced = tuple(page.block(local_rank) + c.FENCED for local_rank in range(page.ranks))
        self._iterations = tuple(page.block(local_rank) + c.ITERATION for local_rank in range(page.ranks))
        self._saved = tuple(page.block(local_rank) + c.SAVED for local_rank in range(page.ranks))

    @property
    def newest(self) -> int:
        """Newest iteration that a rank here has published."""
        return max(self._words[index] for index in self._iterations)

    @property
    def oldest(self) -> int:
        """Oldest of the ranks' newest iterations."""
        return min(self._words[index] for index in self._iterations)

    @property
    def epoch(self) -> int:
        """Newest epoch."""
        return self._words[c.EPOCH]

    @property
    def voted(self) -> int:
        """Epoch of the yes to which no decision was heard, or 0."""
        words = self._words
        waiting = words[c.PROPOSAL] and words[c.DECISION] == c.OPEN and words[c.VOTED] == words[c.EPOCH]
        return words[c.EPOCH] if waiting else 0

    def take_over(self) -> None:
        """Settle what an agent before this one has left: without a yes of its own, a proposal is nothing."""
        words = self._words
        if words[c.PROPOSAL] and words[c.DECISION] == c.OPEN and words[c.VOTED] != words[c.EPOCH]:
            words[c.DECISION] = c.ABORT
            words[c.PROPOSAL] = 0

    def consider(self, propose: Propose) -> Vote:
        """Put a proposal before the ranks and vote."""
        words = self._words
        if propose.epoch <= self.epoch or words[c.PROPOSAL]:
            # old, or something else is not finished here: an agent that has voted yes never decides alone
            return Vote(epoch=propose.epoch, yes=False, newest=self.newest)
        words[c.EPOCH] = propose.epoch
        words[c.DECISION] = c.OPEN
        words[c.STOP] = int(propose.stop)
        words[c.DEADLINE] = int((propose.deadline_s or 0) * 1000)
        try:
            self._barrier()  # who sees the proposal sees what belongs to it
            words[c.PROPOSAL] = propose.iteration
            faults.point("agent.proposed")
            self._barrier()
            newest = self.newest
            yes = newest < propose.iteration
        except ServiceError as error:
            event(log, "no_barrier", level=logging.ERROR, why=str(error))
            newest, yes = self.newest, False
        if yes:
            words[c.VOTED] = propose.epoch
        else:
            words[c.DECISION] = c.ABORT  # a no settles it
            words[c.PROPOSAL] = 0
        return Vote(epoch=propose.epoch, yes=yes, newest=newest)

    def _fence(self) -> None:
        # a rank that is not here yet may come, register and step meanwhile: then only the global kind reaches it
        c.membarrier(expedited=all(self._words[index] for index in self._fenced))

    def decide(self, decide: Decide) -> None:
        """Hear a decision; one about another epoch than the open one is old news."""
        words = self._words
        if decide.epoch != words[c.EPOCH] or words[c.DECISION] != c.OPEN or not words[c.PROPOSAL]:
            return
        if decide.commit:
            words[c.DECISION] = c.COMMIT
        else:
            words[c.DECISION] = c.ABORT
            words[c.PROPOSAL] = 0

    def deadline(self, deadline_s: float) -> None:
        """Hear a deadline, Unix seconds."""
        self._words[c.DEADLINE] = int(deadline_s * 1000)

    def sealed_all(self, iteration: int) -> None:
        """Hear that all ranks of the run have sealed an iteration."""
        if iteration > self._words[c.SEALED_ALL]:
            self._words[c.SEALED_ALL] = iteration

    def safe(self, *, protected: int = 0, durable: int = 0) -> None:
        """Hear which iterations are protected, and durable."""
        words = self._words
        words[c.PROTECTED] = max(words[c.PROTECTED], protected)
        words[c.DURABLE] = max(words[c.DURABLE], durable)

    def abandon(self, iteration: int) -> None:
        """Hear that an iteration is given up: nobody has to save at it any more, nobody waits for it.

        A stop that was committed stands: ranks that have not come to it yet must not go on alone.
        """
        words = self._words
        words[c.FAILED] = max(words[c.FAILED], iteration)
        if words[c.DECISION] == c.COMMIT and not words[c.STOP] and 0 < words[c.PROPOSAL] <= iteration:
            words[c.PROPOSAL] = 0

    def tidy(self) -> None:
        """Take a committed proposal away once all ranks here have acted on it: their steps are then cheap again."""
        words = self._words
        target = words[c.PROPOSAL]
        if target and words[c.DECISION] == c.COMMIT and all(words[index] >= target for index in self._saved):
            words[c.PROPOSAL] = 0
