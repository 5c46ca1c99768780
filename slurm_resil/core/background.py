"""Threads that run calls in order, beside the caller, or share the caller's work."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from slurm_resil.core.log import event

log = logging.getLogger(__name__)
_T = TypeVar("_T")


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
                del call  # what it holds on to may be a whole state
                with self._changed:
                    self._open -= 1
                    self._changed.notify_all()


CREW = 3  # threads at most; with the caller it is as many as memory can feed


def crew(name: str, processes: int) -> list[Background]:
    """Make threads that :func:`share` work with the caller: as many as CPUs are left for each, one at least.

    Args:
        name: Of the threads.
        processes: How many processes of this host do the same at the same time.
    """
    return [Background(name) for _ in range(max(1, min(CREW, len(os.sched_getaffinity(0)) // max(processes, 1) - 1)))]


def share(call: Callable[[_T], None], portions: Iterable[_T], helpers: Sequence[Background]) -> None:
    """Call something for each portion of some work, by the caller and its helpers.

    Args:
        call: Gets a portion.
        portions: All of them; whoever is free takes the next.
        helpers: Threads that take part as soon as they have nothing else to do.

    Raises:
        BaseException: What a call raised, the first one; the portions that nobody has begun are left then.
    """
    if not helpers:
        for portion in portions:
            call(portion)
        return
    left, lock, open_, ended = iter(portions), threading.Lock(), 0, threading.Condition()
    problems: list[BaseException] = []

    def work() -> None:
        nonlocal open_
        with ended:
            if problems:
                return
            open_ += 1
        try:
            while not problems:
                with lock:
                    portion = next(left, None)
                if portion is None:
                    return
                call(portion)
        except BaseException as error:  # noqa: BLE001 -- it is raised by the caller
            problems.append(error)
        finally:
            with ended:
                open_ -= 1
                ended.notify_all()

    for helper in helpers:
        helper.put(work)
    work()
    with ended:  # one that has not begun finds nothing to do
        ended.wait_for(lambda: not open_)
    if problems:
        raise problems[0]
