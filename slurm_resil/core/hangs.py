"""Calls that take very long, told while they last: whoever waits in one cannot tell anything himself."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

FIRST_S = 5.0  # a call that takes so long is told
MOST_S = 60.0  # longest time from one word about it to the next

Tell = Callable[[str, float, bool], None]
"""Hears what is being done, for how many seconds, and whether it is over."""


class HangWatch:
    """Watches the calls of one thread, from a thread of its own. Use as a context manager.

    Args:
        tell: Called while a call takes long, and once more when it is over; a call that does not is never told.
        first_s: See :data:`FIRST_S`.
    """

    def __init__(self, tell: Tell, *, first_s: float = FIRST_S) -> None:
        self._tell, self._first_s = tell, first_s
        self._doing: tuple[str, float] | None = None
        self._told_s = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hangs", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    @contextlib.contextmanager
    def inside(self, doing: str) -> Iterator[None]:
        """A block whose calls may take long; ``doing`` says what it is about, as in ``writing PATH``."""
        before = self._doing
        self._enter((doing, time.monotonic()))
        try:
            yield
        finally:
            self._enter((before[0], time.monotonic()) if before else None)

    def further(self) -> None:
        """The block has got on: its time begins again."""
        doing = self._doing
        if doing is not None:
            self._enter((doing[0], time.monotonic()))

    def _enter(self, doing: tuple[str, float] | None) -> None:
        with self._lock:
            before, told_s = self._doing, self._told_s
            self._doing, self._told_s = doing, 0.0
            if before is not None and told_s:
                self._tell(before[0], time.monotonic() - before[1], True)

    def _watch(self) -> None:
        while not self._over.wait(self._first_s / 5):
            with self._lock:
                if self._doing is None:
                    continue
                doing, since = self._doing
                lasts = time.monotonic() - since
                if lasts >= min(max(self._first_s, 2 * self._told_s), self._told_s + MOST_S):
                    self._told_s = lasts
                    self._tell(doing, lasts, False)
