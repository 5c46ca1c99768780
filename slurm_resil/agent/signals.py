"""Signals of a grace period: what they mean.

Slurm sends the steps of a job that is to go CONT and TERM, in either order (or CONT and the user's own signal with
``send_user_signal``); with ``--signal=USR1@60`` it sends that signal alone some time before the limit. CONT alone means
that the job was suspended and goes on. Source: facts measured on 22.05, 24.11 and 26.05.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from types import FrameType

from slurm_resil.core.model import Notice, NoticeKind

SETTLE_S = 0.3  # CONT may come after the other one
WATCHED = (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2)


class GraceSignals:
    """Collects signals; :meth:`poll` turns them into one notice."""

    def __init__(self) -> None:
        self._came: deque[tuple[int, float]] = deque(maxlen=64)
        self._cont = -1e9
        self._first: tuple[int, float] | None = None
        self._told = False

    def install(self) -> None:
        """Set the handlers (main thread only). They note the signal, no more; the process does not end by it."""
        for number in WATCHED:
            signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.came(number, time.monotonic())

    def came(self, number: int, at: float) -> None:
        """Note a signal; safe in a handler."""
        self._came.append((number, at))

    def poll(self, now: float) -> Notice | None:
        """Return the notice of a grace period, once."""
        while self._came:
            number, at = self._came.popleft()
            if number == signal.SIGCONT:
                self._cont = at
            elif self._first is None:
                self._first = (number, at)
        if self._first is None or self._told or now < self._first[1] + SETTLE_S:
            return None
        self._told = True
        number, at = self._first
        name = signal.Signals(number).name
        with_cont = abs(self._cont - at) <= 2.0
        preempted = number == signal.SIGTERM or with_cont
        kind = NoticeKind.PREEMPTION if preempted else NoticeKind.WALLTIME
        return Notice(kind=kind, stop=True, source=f"signal {name}{' and SIGCONT' if with_cont else ''}")
