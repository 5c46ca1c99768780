"""How long a call keeps other threads of its process from running, and what memory of its own the process has."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable

_PAUSE_S = 0.0001
_END_S = 5.0  # a machine that does not run a thread for so long says nothing
_JITTER = 0.98  # of the pauses are no later than this when nothing runs


class Ticker:
    """A thread that wants to run all the time, with short pauses: what comes late was kept from the interpreter.

    Use as a context manager, around calls of :meth:`during`. It runs where the thread that makes it runs.
    """

    def __init__(self) -> None:
        self._gaps: list[float] = []
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Ticker:
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1.0)  # who holds the interpreter is not asked to give it up
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        sys.setswitchinterval(self._interval)

    def during(self, call: Callable[[], object]) -> float:
        """Run a call; returns the seconds that the thread was late by, over its usual pause.

        Only what is later than nearly all pauses are when nothing runs: a long call would else collect their jitter.
        """
        self._gaps.clear()
        time.sleep(0.05)
        idle = sorted(self._gaps)
        usual, late = statistics.median(idle), idle[int(len(idle) * _JITTER)]
        self._gaps.clear()
        call()
        seen, end = len(self._gaps), time.perf_counter() + _END_S
        while len(self._gaps) <= seen and time.perf_counter() < end:
            time.sleep(usual)  # until the last gap has ended
        return sum(gap - usual for gap in list(self._gaps) if gap > late)

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._stop:
            time.sleep(_PAUSE_S)
            now = time.perf_counter()
            self._gaps.append(now - last)
            last = now


def own_bytes() -> int:
    """Memory of this process that is no file's and is in use."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024
