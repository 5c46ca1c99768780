"""What the launcher writes down in the run's directory: the event log, and one record per attempt.

``events.jsonl``: one object per line, appended: ``time`` (Unix seconds), ``attempt``, ``event`` and its fields.

``attempts/<attempt>.json``, rewritten as the attempt goes on::

    {"attempt": 1, "job_id": 12, "restarts": 1, "nodes": ["n1", "n5"], "started_s": ..., "restored": 40, "held": false,
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
from typing import Any

from slurm_resil.core import fsio
from slurm_resil.core.errors import DataError
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


def record_path(run_dir: str, attempt: int) -> str:
    """Record of an attempt."""
    return os.path.join(run_dir, "attempts", f"{attempt}.json")


class Attempt:
    """Record of the attempt that runs now.

    Args:
        run_dir: Run's directory.
        attempt: Its number.
        job_id: Job.
        restarts: How often Slurm had started it again.
        nodes: Nodes, by node_rank.
    """

    def __init__(self, run_dir: str, attempt: int, *, job_id: int, restarts: int, nodes: Sequence[str]) -> None:
        self._path = record_path(run_dir, attempt)
        self._values: dict[str, Any] = {
            "attempt": attempt,
            "job_id": job_id,
            "restarts": restarts,
            "nodes": list(nodes),
            "started_s": round(time.time(), 3),
            "restored": None,
            "held": False,
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
    return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()]


def next_number(run_dir: str) -> int:
    """Number of the attempt that begins now."""
    return max(_numbers(run_dir), default=-1) + 1


def complete(run_dir: str, job_id: int, *, restarts: int, within_s: float) -> bool:
    """Whether Slurm has started a job again that had brought its training to the end a moment before.

    Seen on 24.11 after the loss of a node. A launcher that the same batch script starts once more is another thing.
    """
    try:
        raw = fsio.read_json(record_path(run_dir, max(_numbers(run_dir), default=-1)))
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
            raw = fsio.read_json(record_path(run_dir, number))
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
