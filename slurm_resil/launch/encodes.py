"""Which checkpoint is protected when. Pure; a part of the policy.

One mover at a time, started as soon as all ranks have sealed; the newest sealed checkpoint is the one that goes, and
one that was overtaken before its turn came leaves the scheme that was due to the next. One that cannot be encoded is
left as it is after a few attempts; if there is no room for its redundancy, the later ones are not tried any more. What
becomes of a checkpoint is told to the agents, which keep its shards for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slurm_resil.core.schemes import Scheme
from slurm_resil.launch import moves as m

SINGLE = Scheme(kind="single", losses=0)
HANGS = 10.0  # times the last one's duration
WORTH = 2.0  # how many times longer than an encode a drain must take for the encode to come before it at an end


class Chosen(Protocol):
    """What the job has chosen; checkpoints are counted from 0 in each attempt."""

    @property
    def protects(self) -> bool:
        """Whether any checkpoint is protected."""

    def scheme(self, number: int) -> Scheme:
        """How a checkpoint is protected."""

    def drained(self, number: int) -> bool:
        """Whether a checkpoint is drained while training goes on."""


@dataclass(frozen=True)
class Uniform:
    """The same for every checkpoint, and all are drained."""

    one: Scheme = SINGLE

    @property
    def protects(self) -> bool:
        """See Chosen."""
        return self.one.losses > 0

    def scheme(self, number: int) -> Scheme:
        """See Chosen."""
        return self.one

    def drained(self, number: int) -> bool:
        """See Chosen."""
        return True


class Encodes:
    """See the module.

    Args:
        chosen: Which scheme is due when.
        guess_s: Cost of an encode before one was measured, seconds.
        tries: Attempts for one checkpoint.
        retry_s: Wait after one that failed.
        limit_s: How long one may take at least before it is given up: what it holds cannot be overwritten.

    Attributes:
        sealed: Newest iteration that all ranks have sealed.
        protected: Newest iteration with redundancy.
        losses: Nodes of a set that it survives.
        ready: Newest iteration that is protected, or that will not be although it is there.
        moving: Iteration that is being encoded.
        cost_s: What the last encode took.
        off: Why nothing is protected any more; empty if checkpoints are.
    """

    def __init__(self, chosen: Chosen, *, guess_s: float, tries: int, retry_s: float, limit_s: float) -> None:
        self._chosen, self._tries, self._retry_s, self._limit_s = chosen, tries, retry_s, limit_s
        self.sealed = self.protected = self.losses = self.ready = 0
        self.moving: int | None = None
        self.cost_s = guess_s
        self.off = ""
        self._due = self._used = SINGLE
        self._given_up = 0  # newest iteration that will not be protected
        self._failures = 0
        self._next = self._since = 0.0
        self._cancelled = False
        self._hangs = ""

    def restored(self, iteration: int, protected: int) -> None:
        """Training goes on from an iteration; ``protected`` is the newest up to there with redundancy."""
        self.sealed, self.protected, self.ready = iteration, protected, protected
        self._given_up = self._failures = 0
        self._due = self._scheme(0) if protected < iteration else SINGLE
        self.losses = max(1, self._chosen.scheme(0).losses) if protected else 0

    def all_sealed(self, iteration: int, number: int) -> list[m.Action]:
        """Hear that all ranks have sealed an iteration, the ``number``-th of this attempt."""
        if iteration <= self.sealed:
            return []
        self.sealed, self._failures, self._next = iteration, 0, 0.0
        due = self._scheme(number)
        self._due = max(self._due, due, key=lambda one: one.losses)
        if self._due.losses:
            return []
        return self._give_up(iteration) if self._chosen.protects else []

    def target(self, durable: int) -> int | None:
        """Checkpoint that should be protected next; one that is durable needs it no more."""
        newest = self.sealed
        settled = max(self.protected, self._given_up, durable)
        return newest if self._due.losses and newest > settled else None

    def busy(self, durable: int) -> bool:
        """Whether something is, or should be, encoded that is not durable."""
        return self.target(durable) is not None or (self.moving or 0) > durable

    def start(self, now: float, durable: int, *, final: bool = False) -> list[m.Action]:
        """Start an encode if one is due; ``final``: nothing may keep it."""
        target = self.target(durable)
        if target is None or self.moving is not None or now < self._next:
            return []
        self.moving, self._since, self._cancelled, self._hangs = target, now, False, ""
        self._used, self._due = self._due, SINGLE
        return [m.Encode(iteration=target, scheme=str(self._used), finish=final)]

    def tick(self, now: float) -> list[m.Action]:
        """Time has passed: one that takes much longer than others hangs."""
        limit_s = max(self._limit_s, HANGS * self.cost_s)
        if self.moving is None or self._hangs or now < self._since + limit_s:
            return []
        self._hangs = f"it took over {limit_s:.0f} s"
        return [m.CancelEncode(why=self._hangs)]

    def first(self, now: float, durable: int, left_s: float | None, drain_s: float) -> bool:
        """Whether at an end the newest checkpoint is encoded before it is drained.

        Args:
            now: Seconds.
            durable: Newest durable iteration.
            left_s: Seconds that are left; None without a deadline.
            drain_s: What the drain will take.
        """
        if self._failures or (self.target(durable) is None and (self.moving is None or self.moving != self.sealed)):
            return False
        if self.moving is not None and now >= self._since + max(drain_s, WORTH * self.cost_s):
            return False  # it may hang
        worth = WORTH * self.cost_s <= drain_s
        if left_s is None or left_s >= self.cost_s + drain_s:
            return worth
        return left_s < drain_s and self.cost_s < drain_s

    def cancel(self, why: str, *, unless: int | None = None) -> list[m.Action]:
        """Stop the mover, unless it is at iteration ``unless``."""
        if self.moving is None or self._cancelled or self.moving == unless:
            return []
        self._cancelled = True
        return [m.CancelEncode(why=why)]

    def ended(self, event: m.MoverEnded, now: float) -> list[m.Action]:
        """Hear how an encode ended."""
        iteration, seconds = event.iteration, round(event.duration_s, 3)
        self.moving = None
        if event.ok:
            if iteration > self.protected:
                self.protected, self.losses = iteration, self._used.losses
                self.ready = max(self.ready, iteration)
            self.cost_s = event.duration_s
            fields = {"iteration": iteration, "scheme": str(self._used), "seconds": seconds}
            done = m.Report(event="protected", fields=fields)
            return [m.TellProtected(iteration=iteration, seconds=event.duration_s), done]
        self._due = max(self._due, self._used, key=lambda one: one.losses)
        if self._cancelled or (event.stopped and not self._hangs):  # that is no failure
            report = m.Report(event="encode_cancelled", fields={"iteration": iteration, "seconds": seconds})
            return [report, *(self._give_up(iteration) if self.sealed > iteration else [])]
        fields = {"iteration": iteration, "words": self._hangs or event.words}
        if self.sealed > iteration:
            # its slot may have been taken for a newer one, which goes next
            return [m.Report(event="encode_overtaken", fields=fields), *self._give_up(iteration)]
        self._failures += 1
        self._next = now + self._retry_s
        report = m.Report(event="encode_failed", fields=fields)
        if not event.final and self._failures < self._tries:
            return [report]
        if event.no_room:
            self.off, self._due = event.words, SINGLE
            return [report, m.Report(event="protection_off", fields={"words": self.off}), *self._give_up(iteration)]
        return [report, *self._give_up(iteration)]

    def _scheme(self, number: int) -> Scheme:
        return SINGLE if self.off else self._chosen.scheme(number)

    def _give_up(self, iteration: int) -> list[m.Action]:
        self._given_up = max(self._given_up, iteration)
        if iteration == self.sealed:
            self.ready = iteration
        return [m.TellUnprotected(iteration=iteration)]
