"""Which checkpoint is drained when. Pure; a part of the policy.

One mover at a time; the newest sealed checkpoint is the one that goes; while training, the mover runs at most half of
the time, and a checkpoint goes when its redundancy is done. Where only some are drained, the first one that is ready
after one was due goes. One that cannot be drained is left in the burst buffer after a few attempts.

At an end the drain that runs is ordered to go on without a cap; it is started anew only if it does not hear that.
"""

from __future__ import annotations

from slurm_resil.launch import moves as m
from slurm_resil.launch.rules import Rules


class Drains:
    """See the module.

    Args:
        rules: Bounds.
        durable: Newest durable iteration at the start.

    Attributes:
        sealed: Newest iteration that all ranks have sealed.
        ready: Newest iteration that may be drained while training goes on.
        due: Oldest iteration that will do for the next drain while training goes on, None if none is due.
        durable: Newest durable iteration.
        moving: Iteration that is being drained.
        cost_s: What the last drain took.
    """

    def __init__(self, rules: Rules, *, durable: int) -> None:
        self._tries, self._retry_s = rules.drain_tries, rules.retry_s
        self._order_s, self._start_s = rules.order_s, rules.start_s
        self.sealed = self.ready = 0
        self.due: int | None = None
        self.durable = durable
        self.moving: int | None = None
        self.cost_s = rules.drain_guess_s
        self._capped = False
        self._cancelled = False
        self._hears = 0.0  # from when on it hears orders, at the latest
        self._ordered: m.HurryDrain | None = None
        self._ordered_at = 0.0
        self._declined = 0  # a person does not want this one drained while training goes on
        self._next = 0.0
        self._failures: dict[int, int] = {}

    @property
    def newest(self) -> int:
        """Newest iteration that can be restored in the allocation."""
        return max(self.sealed, self.durable)

    def restored(self, iteration: int, durable: int) -> None:
        """Training goes on from an iteration; ``durable`` is the newest durable one up to there."""
        self.sealed, self.ready = iteration, 0
        self.durable, self.due = durable, iteration if iteration > durable else None

    def all_sealed(self, iteration: int, *, due: bool) -> None:
        """Hear that all ranks have sealed an iteration; ``due``: it is to be drained while training goes on."""
        self.sealed = iteration
        if due and self.due is None:
            self.due = iteration

    def target(self, *, final: bool = True) -> int | None:
        """Checkpoint that should become durable next; ``final``: whatever would be its turn otherwise."""
        newest = self.sealed if final else self.ready
        if not final and (self.due is None or newest < self.due or newest <= self._declined):
            return None
        if newest <= self.durable or self._failures.get(newest, 0) >= self._tries:
            return None
        return newest

    @property
    def idle(self) -> bool:
        """Whether nothing is being drained and nothing should be."""
        return self.moving is None and self.target() is None

    def start(self, now: float, *, final: bool) -> list[m.Action]:
        """Start a drain if one is due; ``final``: at once and without a cap, also if it runs already."""
        target = self.target(final=final)
        if self.moving is not None:
            return self._finish(now, target) if final else []
        if target is None or (now < self._next and (self._failures.get(target) or not final)):
            return []
        self.moving, self._capped, self._cancelled = target, not final, False
        self._ordered, self._hears = None, now + self._start_s
        self.due = None
        return [m.Drain(iteration=target, capped=not final)]

    def _finish(self, now: float, target: int | None) -> list[m.Action]:
        assert self.moving is not None
        if target is not None and target > self.moving and self._capped:
            return self.cancel(f"iteration {target} is the one to keep, without a cap")
        return self.hurry(now, finish=True)

    def hurry(self, now: float, *, finish: bool) -> list[m.Action]:
        """Let the running drain go on without a cap; ``finish``: what it drains is what is left in the end."""
        if self.moving is None or not self._capped or self._cancelled:
            return []
        if self._ordered is not None and (self._ordered.finish or not finish):
            return []
        self._ordered, self._ordered_at = m.HurryDrain(iteration=self.moving, finish=finish), now
        return [self._ordered]

    def began(self, event: m.DrainBegan, now: float) -> list[m.Action]:
        """Hear that the drain is past its start."""
        if event.iteration == self.moving:
            self._hears = min(self._hears, now)
        return []

    def taken(self, event: m.OrderTaken) -> list[m.Action]:
        """Hear that an order was heard."""
        if event.iteration == self.moving and event.finish:
            self._capped = False
        return [m.Report(event="drain_hurried", fields={"iteration": event.iteration, "finish": event.finish})]

    def tick(self, now: float) -> list[m.Action]:
        """Time has passed: one that does not hear that it is to finish is started anew."""
        if self.moving is None or not self._capped or self._ordered is None or not self._ordered.finish:
            return []
        if now < max(self._ordered_at, self._hears) + self._order_s:
            return []
        return self.cancel("it does not hear that it is to go on without a cap")

    def cancel(self, why: str, *, unless: int | None = None) -> list[m.Action]:
        """Stop the mover, unless it drains iteration ``unless``."""
        if self.moving is None or self._cancelled or self.moving == unless:
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
        self.due = event.iteration  # or a newer one
        if event.cancelled:
            return self._by_a_person(event, seconds)
        if self._cancelled or event.stopped:  # that is no failure
            return [m.Report(event="drain_cancelled", fields={"iteration": event.iteration, "seconds": seconds})]
        if (self.ready if self._capped else self.sealed) > event.iteration:
            # saves are faster than a drain begins: its slot may have been taken for a newer one, which goes next
            fields = {"iteration": event.iteration, "words": event.words, "newest": self.sealed}
            return [m.Report(event="drain_overtaken", fields=fields)]
        self._failures[event.iteration] = self._failures.get(event.iteration, 0) + 1
        self._next = now + self._retry_s
        fields = {"iteration": event.iteration, "words": event.words}
        return [m.Report(event="drain_failed", fields=fields)]

    def _by_a_person(self, event: m.MoverEnded, seconds: float) -> list[m.Action]:
        """A drain that somebody has ended is not begun again; while training goes on the next checkpoint's is."""
        if self._capped:
            self._declined = event.iteration
        else:
            self._failures[event.iteration] = self._tries
        return [m.Report(event="drain_declined", fields={"iteration": event.iteration, "seconds": seconds})]
