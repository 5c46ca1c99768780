"""What the engine means to do and what it did, in SQLite: an intent is written before its first action."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from dataclasses import dataclass
from typing import Any

_SCHEMA = """
CREATE TABLE IF NOT EXISTS incidents (
  id INTEGER PRIMARY KEY, job INTEGER NOT NULL, uid INTEGER NOT NULL, restarts INTEGER NOT NULL,
  bad TEXT NOT NULL, good TEXT NOT NULL, spare TEXT NOT NULL DEFAULT '[]', reason TEXT NOT NULL, level TEXT NOT NULL,
  created_s REAL NOT NULL, outcome TEXT NOT NULL DEFAULT '', ended_s REAL,
  UNIQUE (job, restarts)
);
CREATE TABLE IF NOT EXISTS audit (
  id INTEGER PRIMARY KEY, incident INTEGER NOT NULL, at_s REAL NOT NULL, action TEXT NOT NULL, result TEXT NOT NULL
);
"""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One job to be continued.

    Attributes:
        restarts: ``Restarts`` of the job when it was asked for; with the job it names one continuation for good.
        bad: Nodes that it must not get again.
        good: Nodes that it keeps.
        spare: Nodes that take the place of the bad ones; empty until they are chosen.
        outcome: Empty while it is going on.
    """

    id: int
    job: int
    uid: int
    restarts: int
    bad: tuple[str, ...]
    good: tuple[str, ...]
    spare: tuple[str, ...]
    reason: str
    level: str
    created_s: float
    outcome: str
    ended_s: float | None


class Store:
    """The engine's database; safe for use by several threads."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def open(
        self, *, job: int, uid: int, restarts: int, bad: tuple[str, ...], good: tuple[str, ...], reason: str, level: str
    ) -> tuple[Incident, bool]:
        """Write an intent; returns it, and whether it is new (a second ask for the same restart is the first one)."""
        values = (job, uid, restarts, json.dumps(bad), json.dumps(good), reason, level, time.time())
        with self._lock:
            new = self._db.execute(
                "INSERT OR IGNORE INTO incidents (job, uid, restarts, bad, good, reason, level, created_s)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            ).rowcount
        return next(entry for entry in self.incidents(job=job) if entry.restarts == restarts), bool(new)

    def spares(self, incident: int, names: tuple[str, ...]) -> None:
        """Write down the chosen spares."""
        with self._lock:
            self._db.execute("UPDATE incidents SET spare = ? WHERE id = ?", (json.dumps(names), incident))

    def end(self, incident: int, outcome: str) -> None:
        """Close an incident."""
        with self._lock:
            self._db.execute(
                "UPDATE incidents SET outcome = ?, ended_s = ? WHERE id = ?", (outcome, time.time(), incident)
            )

    def audit(self, incident: int, action: str, result: str) -> None:
        """Add a line to the audit trail."""
        with self._lock:
            self._db.execute(
                "INSERT INTO audit (incident, at_s, action, result) VALUES (?, ?, ?, ?)",
                (incident, time.time(), action, result),
            )

    def incidents(self, *, job: int | None = None) -> list[Incident]:
        """Incidents, oldest first."""
        where, values = ("WHERE job = ?", (job,)) if job is not None else ("", ())
        with self._lock:
            rows = self._db.execute(f"SELECT * FROM incidents {where} ORDER BY id", values).fetchall()  # noqa: S608 - no input in it
        return [_incident(dict(row)) for row in rows]

    def trail(self, incident: int) -> list[dict[str, Any]]:
        """The audit trail of one incident, oldest first."""
        with self._lock:
            rows = self._db.execute(
                "SELECT at_s, action, result FROM audit WHERE incident = ? ORDER BY id", (incident,)
            ).fetchall()
        return [dict(row) for row in rows]


def _incident(row: dict[str, Any]) -> Incident:
    lists = {name: tuple(json.loads(row[name])) for name in ("bad", "good", "spare")}
    return Incident(**{**row, **lists})
