"""How far a mover is, how fast it goes, and how much longer the phase will take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from slurm_resil.core.hangs import HangWatch
from slurm_resil.core.throttle import Clock, SystemClock


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a mover is.

    Attributes:
        phase: ``write``, ``verify``, ``encode``, ``rebuild`` or ``fetch``.
        done_bytes: Bytes of all movers, estimated; what an earlier drain had written counts.
        total_bytes: Bytes of the phase.
        rate_bytes_s: Bytes per second of this phase, waits for a checkpoint left out; 0 if it is not known yet.
        left_s: Time that is left of the phase at this rate, seconds; None if it is not known.
        waits: What it waits for, in words; empty if it is at work.
    """

    phase: str
    done_bytes: int
    total_bytes: int
    rate_bytes_s: float = 0.0
    left_s: float | None = None
    waits: str = ""


class Meter:
    """Tells how far it is.

    Args:
        tell: Gets every progress.
        clock: Time.
        watch: Watches calls into storage; None: nobody does.
    """

    def __init__(
        self, tell: Callable[[Progress], None], clock: Clock | None = None, watch: HangWatch | None = None
    ) -> None:
        self._tell, self._clock, self._watch = tell, clock or SystemClock(), watch
        self._phase, self._total, self._done, self._from = "", 0, 0, 0
        self._began = self._lost = self._clock.now()

    def begin(self, phase: str, total_bytes: int) -> None:
        """Begin a phase."""
        self._phase, self._total, self._done, self._from = phase, total_bytes, 0, 0
        self._began, self._lost = self._clock.now(), 0.0
        self._show("")

    def storage(self, doing: str) -> AbstractContextManager[None]:
        """A block that calls storage, see :class:`HangWatch`."""
        return self._watch.inside(doing) if self._watch is not None else contextlib.nullcontext()

    def further(self, nbytes: int, *, skipped: int = 0) -> None:
        """Hear of more bytes; ``skipped`` of them were there before and say nothing about the rate."""
        if self._watch is not None:
            self._watch.further()
        self._done = min(self._done + nbytes, self._total)
        self._from += skipped
        self._show("")

    def waits(self, words: str, *, lost_s: float = 0.0) -> None:
        """Hear that it waits; ``lost_s`` seconds more do not count for the rate."""
        if self._watch is not None:
            self._watch.further()
        self._lost += lost_s
        self._show(words)

    def _show(self, words: str) -> None:
        moved, seconds = self._done - self._from, self._clock.now() - self._began - self._lost
        rate = moved / seconds if moved > 0 and seconds > 0 else 0.0
        left = (self._total - self._done) / rate if rate else None
        self._tell(
            Progress(
                phase=self._phase,
                done_bytes=self._done,
                total_bytes=self._total,
                rate_bytes_s=rate,
                left_s=left,
                waits=words,
            )
        )
