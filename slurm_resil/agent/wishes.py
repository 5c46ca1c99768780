"""What the leader is to do next: notices merged into at most one stop and one plain checkpoint. Pure."""

from __future__ import annotations

import math

from slurm_resil.core.model import Notice


class Wishes:
    """See the module.

    Args:
        interval_s: A plain checkpoint is wanted as often as this, None for never.

    Attributes:
        stop: The stop that is asked for, with the earliest deadline of all that asked; None if none is.
        stopped: Whether it has been carried out.
    """

    def __init__(self, interval_s: float | None) -> None:
        self._interval_s = interval_s if interval_s is not None else math.inf
        self._wanted = False
        self._due = math.inf
        self.stop: Notice | None = None
        self.stopped = False

    def begin(self) -> None:
        """Begin a cycle; a stop that was asked for is still asked for."""
        self._wanted, self.stopped, self._due = False, False, math.inf

    def train(self, now: float) -> None:
        """Hear that the ranks train, or have just saved: the interval starts."""
        self._due = now + self._interval_s

    def hear(self, notice: Notice) -> bool:
        """Hear a notice; returns whether it says anything new."""
        if not notice.stop:
            self._wanted = True
            return True
        known = self.stop
        deadlines = [one.deadline_s for one in (known, notice) if one is not None and one.deadline_s is not None]
        earliest = min(deadlines, default=None)
        self.stop = Notice(kind=notice.kind, stop=True, deadline_s=earliest, source=notice.source)
        return known is None or (known.deadline_s, known.kind) != (earliest, notice.kind)

    def next(self, now: float) -> bool | None:
        """Say what to propose now: True a stop, False a plain checkpoint, None nothing."""
        if self.stopped:
            return None
        if self.stop is not None:
            return True
        if now >= self._due:
            self._wanted = True
        return False if self._wanted else None

    def committed(self) -> None:
        """Hear that the ranks will save: what was wanted is under way."""
        self._wanted, self._due = False, math.inf
