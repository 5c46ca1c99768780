"""One thread that runs calls in order, beside the caller."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from slurm_resil.core.log import event

log = logging.getLogger(__name__)


class Background:
    """See the module. The thread is there from the beginning, and has the caller's CPU affinity of that moment.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Run a call, later; it deals with its own errors."""
        with self._changed:
            self._open += 1
        self._calls.put(call)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all calls are done; False if they are not in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._open:
                left = deadline - time.monotonic()
                if left <= 0 or not self._thread.is_alive():  # after a fork there is no thread
                    return False
                self._changed.wait(min(left, 1.0))
            return True

    def close(self) -> None:
        """End the thread after what it has to do."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 -- the next call is another matter
                event(log, "background_call_failed", level=logging.ERROR, why=repr(error))
            finally:
                with self._changed:
                    self._open -= 1
                    self._changed.notify_all()
