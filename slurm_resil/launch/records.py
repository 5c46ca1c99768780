"""What the launcher writes down in the run's directory: the event log, and one record per attempt.

``events.jsonl``: one object per line, appended: ``time`` (Unix seconds), ``attempt``, ``event`` and its fields.

``attempts/<attempt>.json``, rewritten as the attempt goes on::

    {"attempt": 1, "job_id": 12, "restarts": 1, "nodes": ["n1", "n5"], "started_s": ..., "restored": 40, "held": false,
     "job_dir": "/local/slurm-resil/job-12", "slurm": true,
     "levels": {"local": 60, "protected": 60, "durable": 40},
     "intent": {"reason": "node_loss", "bad_nodes": ["n5"], "iteration": 60, "level": "DURABLE", "at_s": ...},
     "outcome": {"words": "...", "at_s": ...}}

An intent is written before anything is asked of engine or Slurm: whoever comes later can tell what was meant.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError
from slurm_resil.core.model import Levels
from slurm_resil.launch.guard import AttemptRecord


class EventLog:
    """Append-only log of a run; safe for use by several threads and attempts.

    Args:
        run_dir: Run's directory.
        attempt: Attempt that writes.
    """

    def __init__(self, run_dir: str, attempt: int) -> None:
        self.path = os.path.join(run_dir, "events.jsonl")
        self._attempt = attempt
        self._failed = False

    def write(self, event: str, **values: object) -> str:
        """Append an event. A file system that refuses does not stop the run; returns why, the first time."""
        entry = {"time": round(time.time(), 3), "attempt": self._attempt, "event": event, **values}
        data = json.dumps(entry, default=str).encode() + b"\n"
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(fd, data)  # one write: lines of several writers do not mix
            finally:
                os.close(fd)
        except OSError as error:
            if not self._failed:
                self._failed = True
                return f"cannot write {self.path}: {error.strerror}"
        return ""


class Attempt:
    """Record of the attempt that runs now.

    Args:
        run_dir: Run's directory.
        attempt: Its number.
        job_id: Job.
        restarts: How often Slurm had started it again.
        nodes: Nodes, by node_rank.
        job_dir: Job's directory in each node's burst buffer.
        slurm: Whether the job is one of Slurm's; else its number is none that Slurm knows.
    """

    def __init__(
        self,
        run_dir: str,
        attempt: int,
        *,
        job_id: int,
        restarts: int,
        nodes: Sequence[str],
        job_dir: str | None = None,
        slurm: bool = True,
    ) -> None:
        self._path = paths.attempt(run_dir, attempt)
        self._values: dict[str, Any] = {
            "attempt": attempt,
            "job_id": job_id,
            "restarts": restarts,
            "nodes": list(nodes),
            "started_s": round(time.time(), 3),
            "restored": None,
            "held": False,
            "job_dir": job_dir,
            "slurm": slurm,
        }
        os.makedirs(os.path.dirname(self._path), exist_ok=True)

    def update(self, **values: object) -> None:
        """Change fields and publish.

        Raises:
            OSError: The file system refused.
        """
        self._values.update(values)
        fsio.write_json(self._path, self._values)


def _numbers(run_dir: str) -> list[int]:
    try:
        names = os.listdir(os.path.join(run_dir, "attempts"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal()]


def next_number(run_dir: str) -> int:
    """Number of the attempt that begins now."""
    return max(_numbers(run_dir), default=-1) + 1


@dataclass(frozen=True, kw_only=True)
class Newest:
    """What the newest attempt is, or was.

    Attributes:
        attempt: Its number.
        job_id: Its job.
        nodes: Nodes, by node_rank.
        job_dir: Job's directory in each node's burst buffer; None if it was not written down.
        local: Whether it is none of Slurm's jobs.
    """

    attempt: int
    job_id: int
    nodes: tuple[str, ...]
    job_dir: str | None
    local: bool


def newest(run_dir: str) -> Newest | None:
    """Read the record of the newest attempt; None if there is none, or it cannot be read."""
    try:
        raw = fsio.read_json(paths.attempt(run_dir, max(_numbers(run_dir), default=-1)))
        job_dir = raw.get("job_dir")
        return Newest(
            attempt=int(raw["attempt"]),
            job_id=int(raw["job_id"]),
            nodes=tuple(map(str, raw["nodes"])),
            job_dir=job_dir if isinstance(job_dir, str) and job_dir else None,
            local=raw.get("slurm") is False,
        )
    except (OSError, DataError, KeyError, TypeError, ValueError, AttributeError):
        return None


def levels(run_dir: str) -> Levels | None:
    """The newest iteration at each level in the newest attempt, as its launcher has recorded them.

    None if nothing is recorded, or cannot be read.
    """
    try:
        raw = fsio.read_json(paths.attempt(run_dir, max(_numbers(run_dir), default=-1)))["levels"]
        found = Levels(**{name: int(raw.get(name, 0)) for name in ("local", "protected", "durable")})
    except (OSError, DataError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return replace(found, protected=max(found.protected, found.durable))


def goes_on_from(run_dir: str, job_id: int) -> int:
    """Iteration that the newest attempt, if it is of this job, wants the next one to go on from; 0 if that is unknown.

    It may be in the burst buffers only.
    """
    try:
        raw = fsio.read_json(paths.attempt(run_dir, max(_numbers(run_dir), default=-1)))
        return int(raw["intent"]["iteration"]) if raw["job_id"] == job_id else 0
    except (OSError, DataError, KeyError, TypeError, ValueError):
        return 0


def complete(run_dir: str, job_id: int, *, restarts: int, within_s: float) -> bool:
    """Whether Slurm has started a job again that had brought its training to the end a moment before.

    Seen on 24.11 after the loss of a node. A launcher that the same batch script starts once more is another thing.
    """
    try:
        raw = fsio.read_json(paths.attempt(run_dir, max(_numbers(run_dir), default=-1)))
        outcome = raw["outcome"]
        again = raw["job_id"] == job_id and raw["restarts"] < restarts
        return bool(again and outcome["code"] == 0 and 0 <= time.time() - outcome["at_s"] < within_s)
    except (OSError, DataError, KeyError, TypeError):
        return False


def history(run_dir: str, attempt: int) -> list[AttemptRecord]:
    """What the attempts before this one started from, oldest first; one without a readable record gained nothing."""
    found = []
    for number in sorted(_numbers(run_dir)):
        if number >= attempt:
            continue
        raw: Any = {}
        with contextlib.suppress(FileNotFoundError, DataError):
            raw = fsio.read_json(paths.attempt(run_dir, number))
        if not isinstance(raw, dict):
            raw = {}
        restored = raw.get("restored")
        found.append(
            AttemptRecord(
                attempt=number,
                restored=restored if isinstance(restored, int) else None,
                held=raw.get("held") is True,
            )
        )
    return found
