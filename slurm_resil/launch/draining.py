"""What is known of the drain that runs: heard from its movers, told, and kept where ``job status`` finds it.

``drain-status.json`` in the run's directory is what the launcher knew last, see :class:`DrainStatus`. A thread of its
own writes it, and the events: the storage that a drain waits for must not keep the launcher from hearing more.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError
from slurm_resil.launch import moves as m
from slurm_resil.launch.steps import as_json

VERSION = 1
_WRITE_S = 1.0  # the file is not written more often, unless there is something to tell
_PROGRESS = ("phase", "rate_bytes_s", "left_s", "waits")
# what movers say that people should know, and what it is called in the event log
_TOLD = {
    "retry": "drain_retry",
    "resumed": "drain_resumed",
    "starts_over": "drain_starts_over",
    "hangs": "drain_hangs",
    "went_on": "drain_went_on",
}


@dataclass(frozen=True, kw_only=True)
class DrainStatus:
    """How far a drain is, or how it ended.

    Attributes:
        iteration: What is drained.
        attempt: Attempt of the job that does it.
        state: ``running``, ``durable``, ``failed`` or ``cancelled``.
        started_s: When it was started, Unix seconds.
        at_s: When the launcher heard of it last, Unix seconds.
        cap_bytes_s: Limit of all movers together, bytes/s; None: none.
        phase: ``write`` or ``verify``; empty before that.
        done_bytes: Bytes of the phase that are done, of all movers.
        total_bytes: Bytes of the phase.
        rate_bytes_s: Bytes per second; 0 if it is not known.
        left_s: Time that is left of the phase, seconds; None if it is not known.
        waits: What it waits for, in words; empty if it is at work.
        hangs: Nodes where a call into storage has not come back: what is done there, and since when, Unix seconds.
        retry: Why it was tried again last: ``error``, ``at_s``, ``in_s``, and ``left_s`` of the budget; empty: never.
        kept_bytes: What an earlier drain had written, and was right.
        words: How it ended, where that was not well.
        before: ``iteration``, ``started_s`` and ``state`` of the drain before it in this attempt; empty: none.
    """

    iteration: int
    attempt: int
    state: str = "running"
    started_s: float = 0.0
    at_s: float = 0.0
    cap_bytes_s: float | None = None
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    rate_bytes_s: float = 0.0
    left_s: float | None = None
    waits: str = ""
    hangs: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    retry: Mapping[str, Any] = field(default_factory=dict)
    kept_bytes: int = 0
    words: str = ""
    before: Mapping[str, Any] = field(default_factory=dict)

    def write(self, run_dir: str) -> None:
        """Publish it.

        Raises:
            OSError: Storage refused.
        """
        fsio.write_json(paths.drain_status(run_dir), {"version": VERSION, **asdict(self)}, sync=False)

    @classmethod
    def read(cls, run_dir: str) -> DrainStatus | None:
        """What the launcher of a run knew last; None if nothing is known, or it cannot be read."""
        try:
            raw = fsio.read_json(paths.drain_status(run_dir), limit_bytes=1 << 24)
            if raw.pop("version") != VERSION:
                return None
            raw["hangs"] = {str(node): (str(doing), float(since)) for node, (doing, since) in raw["hangs"].items()}
            return cls(**raw)
        except (OSError, DataError, KeyError, TypeError, ValueError, AttributeError):
            return None

    def heard(self, line: Mapping[str, Any], now_s: float) -> DrainStatus:
        """What is known after a line of a mover."""
        known = replace(self, at_s=now_s)
        match line.get("event"):
            case "progress":
                more = {name: line[name] for name in _PROGRESS}
                return replace(known, done_bytes=line["bytes"], total_bytes=line["total"], **more)
            case "hangs":
                since = (str(line["doing"]), round(now_s - line["seconds"], 1))
                return replace(known, hangs={**self.hangs, str(line["node"]): since})
            case "went_on":
                return replace(known, hangs={node: one for node, one in self.hangs.items() if node != line["node"]})
            case "retry":
                return replace(
                    known, retry={"at_s": now_s} | {name: line[name] for name in ("error", "in_s", "left_s")}
                )
            case "resumed":
                return replace(known, kept_bytes=line["kept_bytes"])
            case "ordered":
                return replace(known, cap_bytes_s=line["cap_bytes_s"])
        return known


class Draining:
    """Hears the movers of one drain after the other.

    Args:
        run_dir: Run's directory.
        attempt: Attempt of the job.
        say: Writes to the event log, and tells people.
        put: Gets what the policy should hear.
    """

    def __init__(
        self, run_dir: str, attempt: int, *, say: Callable[..., object], put: Callable[[m.Event], None]
    ) -> None:
        self._run_dir, self._attempt, self._say, self._put = run_dir, attempt, say, put
        self._lock = threading.Lock()
        self._status: DrainStatus | None = None
        self._began = self._cancelled = False
        self._told: queue.SimpleQueue[tuple[str, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._tell, name="drain status", daemon=True)

    def start(self, iteration: int, cap_bytes_s: float | None) -> None:
        """A drain is started now."""
        now = round(time.time(), 3)
        with self._lock:
            self._began = self._cancelled = False
            last = self._status
            self._status = DrainStatus(
                iteration=iteration,
                attempt=self._attempt,
                started_s=now,
                at_s=now,
                cap_bytes_s=cap_bytes_s,
                before={name: getattr(last, name) for name in ("iteration", "started_s", "state")} if last else {},
            )
        if not self._thread.is_alive():
            self._thread.start()

    def hear(self, text: str) -> None:
        """A line of its output came; in any thread."""
        line = as_json(text)
        with self._lock:
            if line is None or self._status is None:
                return
            iteration = self._status.iteration
            with contextlib.suppress(KeyError, TypeError, ValueError):  # not of this version: it says nothing
                self._status = self._status.heard(line, round(time.time(), 3))
            name = str(line.get("event"))
            self._cancelled = self._cancelled or name == "cancelled"
            began, self._began = not self._began, True
        if began:
            self._put(m.DrainBegan(iteration=iteration))
        if name == "ordered":
            self._put(m.OrderTaken(iteration=iteration, finish=line.get("finish") is True))
        if name in _TOLD:
            fields = {key: value for key, value in line.items() if key != "event"}
            self._told.put((_TOLD[name], {"iteration": iteration, **fields}))

    def end(self, ended: m.MoverEnded) -> m.MoverEnded:
        """It ended; returns that with what is known besides."""
        with self._lock:
            cancelled = self._cancelled and not ended.ok
            state = "durable" if ended.ok else "cancelled" if cancelled else "failed"
            if self._status is not None:
                now = round(time.time(), 3)
                self._status = replace(self._status, state=state, at_s=now, words=ended.words, hangs={}, waits="")
        return replace(ended, cancelled=cancelled)

    def close(self, timeout_s: float) -> None:
        """Write down what is known, if storage lets us in time."""
        self._told.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _tell(self) -> None:
        """Thread."""
        written: DrainStatus | None = None
        over = False
        while not over:
            with contextlib.suppress(queue.Empty):
                wait_s = _WRITE_S
                while not over:
                    told = self._told.get(timeout=wait_s)
                    over, wait_s = told is None, 0.0  # all that is there, then the file
                    if told is not None:
                        self._say(told[0], **told[1])
            with self._lock:
                status = self._status
            if status is not None and status is not written:
                with contextlib.suppress(OSError):  # whoever looks sees how old it is
                    status.write(self._run_dir)
                written = status
