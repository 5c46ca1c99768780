"""How long a call keeps other threads of its process from running, and what memory of its own the process has."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable

_PAUSE_S = 0.0001


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
        """Run a call; returns the seconds that the thread was late by, over its usual pause."""
        self._gaps.clear()
        time.sleep(0.05)
        usual = statistics.median(self._gaps)
        self._gaps.clear()
        call()
        time.sleep(2 * usual)  # the last gap ends
        return sum(max(0.0, gap - usual) for gap in list(self._gaps))

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
