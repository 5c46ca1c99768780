"""Which checkpoint is drained when. Pure; a part of the policy.

One mover at a time; the newest sealed checkpoint is the one that goes; while training, the mover runs at most half of
the time. One that cannot be drained is left in the burst buffer after a few attempts.
"""

from __future__ import annotations

from slurm_resil.launch import moves as m


class Drains:
    """See the module.

    Args:
        guess_s: Cost of a drain before one was measured, seconds.
        tries: Attempts for one checkpoint.
        retry_s: Wait after one that failed.
        durable: Newest durable iteration at the start.

    Attributes:
        sealed: Newest iteration that all ranks have sealed.
        durable: Newest durable iteration.
        moving: Iteration that is being drained.
        cost_s: What the last drain took.
    """

    def __init__(self, *, guess_s: float, tries: int, retry_s: float, durable: int) -> None:
        self._tries, self._retry_s = tries, retry_s
        self.sealed = 0
        self.durable = durable
        self.moving: int | None = None
        self.cost_s = guess_s
        self._capped = False
        self._cancelled = False
        self._next = 0.0
        self._failures: dict[int, int] = {}

    @property
    def newest(self) -> int:
        """Newest iteration that can be restored in the allocation."""
        return max(self.sealed, self.durable)

    def target(self) -> int | None:
        """Checkpoint that should become durable next."""
        newest = self.sealed
        if newest <= self.durable or self._failures.get(newest, 0) >= self._tries:
            return None
        return newest

    @property
    def idle(self) -> bool:
        """Whether nothing is being drained and nothing should be."""
        return self.moving is None and self.target() is None

    def start(self, now: float, *, final: bool) -> list[m.Action]:
        """Start a drain if one is due; ``final``: at once and without a cap."""
        target = self.target()
        if target is None or self.moving is not None:
            return []
        if now < self._next and (self._failures.get(target) or not final):
            return []
        self.moving, self._capped, self._cancelled = target, not final, False
        return [m.Drain(iteration=target, capped=not final)]

    def cancel(self, why: str, *, unless: int | None = None) -> list[m.Action]:
        """Stop the mover, unless it drains iteration ``unless`` without a cap."""
        if self.moving is None or self._cancelled or (self.moving == unless and not self._capped):
            return []
        self._cancelled = True
        return [m.CancelDrain(why=why)]

    def ended(self, event: m.MoverEnded, now: float) -> list[m.Action]:
        """Hear how a drain ended."""
        self.moving = None
        seconds = round(event.duration_s, 3)
        if event.ok:
            self.durable = max(self.durable, event.iteration)
            self.cost_s = event.duration_s
            self._next = now + event.duration_s
            done = m.Report(event="durable", fields={"iteration": event.iteration, "seconds": seconds})
            return [m.TellDurable(iteration=event.iteration, seconds=event.duration_s), done]
        if self._cancelled:
            return [m.Report(event="drain_cancelled", fields={"iteration": event.iteration, "seconds": seconds})]
        if self.sealed > event.iteration:
            # saves are faster than a drain begins: its slot may have been taken for a newer one, which goes next
            fields = {"iteration": event.iteration, "words": event.words, "newest": self.sealed}
            return [m.Report(event="drain_overtaken", fields=fields)]
        self._failures[event.iteration] = self._failures.get(event.iteration, 0) + 1
        self._next = now + self._retry_s
        fields = {"iteration": event.iteration, "words": event.words}
        return [m.Report(event="drain_failed", fields=fields)]
