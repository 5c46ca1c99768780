"""What the engine means to do and what it did, in SQLite: an intent is written before its first action."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from slurm_resil.core.errors import DataError, missing_path

_SCHEMA = """
CREATE TABLE IF NOT EXISTS incidents (
  id INTEGER PRIMARY KEY, job INTEGER NOT NULL, uid INTEGER NOT NULL, restarts INTEGER NOT NULL,
  bad TEXT NOT NULL, good TEXT NOT NULL, spare TEXT NOT NULL DEFAULT '[]', reason TEXT NOT NULL, level TEXT NOT NULL,
  created_s REAL NOT NULL, tries INTEGER NOT NULL DEFAULT 1, outcome TEXT NOT NULL DEFAULT '', ended_s REAL,
  UNIQUE (job, restarts)
);
CREATE TABLE IF NOT EXISTS audit (
  id INTEGER PRIMARY KEY, incident INTEGER NOT NULL, at_s REAL NOT NULL, action TEXT NOT NULL, result TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS registered (job INTEGER PRIMARY KEY, uid INTEGER NOT NULL, nodes TEXT NOT NULL);
"""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One job to be continued.

    Attributes:
        restarts: ``Restarts`` of the attempt that it ends; with the job it names one continuation for good.
        bad: Nodes that it must not get again.
        good: Nodes that it keeps.
        spare: Nodes that take the place of the bad ones; empty until they are chosen.
        tries: How often it was begun.
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
    tries: int
    outcome: str
    ended_s: float | None


class Store:
    """The engine's database; safe for use by several threads.

    Args:
        path: File.
        readonly: Only to look.

    Raises:
        DataError: It is something else, or damaged.
        ConfigError: There is no such directory.
    """

    def __init__(self, path: str, *, readonly: bool = False) -> None:
        self._lock = threading.Lock()
        with contextlib.ExitStack() as on_error:
            self._connect(path, readonly=readonly, on_error=on_error)
            on_error.pop_all()

    def _connect(self, path: str, *, readonly: bool, on_error: contextlib.ExitStack) -> None:
        try:
            # reading makes no tables and no files
            source = f"file:{quote(path)}?mode=ro" if readonly else path
            self._db = sqlite3.connect(source, uri=readonly, check_same_thread=False, isolation_level=None)
            on_error.callback(self._db.close)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA busy_timeout=5000")
            if readonly:
                self._db.execute("SELECT 1 FROM incidents, registered, audit LIMIT 1")
            else:
                for pragma in ("journal_mode=WAL", "synchronous=FULL"):
                    self._db.execute(f"PRAGMA {pragma}")
                self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            directory = os.path.dirname(os.path.abspath(path))
            if not os.path.isdir(directory):
                mend = f"mkdir -m 700 {directory}, or name another --db"
                raise missing_path(directory, "the directory of the engine's database,", mend) from error
            raise DataError(f"{path} is no database of the engine: {error}", path=path) from error

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def open(
        self, *, job: int, uid: int, restarts: int, bad: tuple[str, ...], good: tuple[str, ...], reason: str, level: str
    ) -> tuple[Incident, bool]:
        """Write an intent; returns it, and whether it is new (a second one for the same attempt is the first one)."""
        values = (job, uid, restarts, json.dumps(bad), json.dumps(good), reason, level, time.time())
        with self._lock:
            new = self._db.execute(
                "INSERT OR IGNORE INTO incidents (job, uid, restarts, bad, good, reason, level, created_s)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            ).rowcount
        return next(entry for entry in self.incidents(job=job) if entry.restarts == restarts), bool(new)

    def reopen(self, incident: Incident, *, bad: tuple[str, ...], good: tuple[str, ...]) -> tuple[Incident, bool]:
        """Begin an incident once more that has ended with its attempt still running; false if it has not ended."""
        with self._lock:
            done = self._db.execute(
                "UPDATE incidents SET bad = ?, good = ?, spare = '[]', outcome = '', ended_s = NULL, created_s = ?,"
                " tries = tries + 1 WHERE id = ? AND outcome != ''",
                (json.dumps(bad), json.dumps(good), time.time(), incident.id),
            ).rowcount
        return next(entry for entry in self.incidents(job=incident.job) if entry.id == incident.id), bool(done)

    def register(self, job: int, uid: int, nodes: tuple[str, ...]) -> None:
        """Look after a job from now on."""
        with self._lock:
            self._db.execute("INSERT OR REPLACE INTO registered VALUES (?, ?, ?)", (job, uid, json.dumps(nodes)))

    def forget(self, job: int) -> None:
        """Look after a job no longer."""
        with self._lock:
            self._db.execute("DELETE FROM registered WHERE job = ?", (job,))

    def registered(self) -> dict[int, tuple[int, tuple[str, ...]]]:
        """Jobs to be looked after: owner, and nodes when it was last seen running."""
        with self._lock:
            rows = self._db.execute("SELECT job, uid, nodes FROM registered ORDER BY job").fetchall()
        return {row["job"]: (row["uid"], tuple(json.loads(row["nodes"]))) for row in rows}

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

    def audit(self, incident: int, action: str, result: str) -> int:
        """Add a line to the audit trail; returns its number, for :meth:`finish`."""
        with self._lock:
            added = self._db.execute(
                "INSERT INTO audit (incident, at_s, action, result) VALUES (?, ?, ?, ?)",
                (incident, time.time(), action, result),
            )
        return int(added.lastrowid or 0)

    def finish(self, line: int, result: str) -> None:
        """Say how an action went that :meth:`audit` has announced."""
        with self._lock:
            self._db.execute("UPDATE audit SET result = ? WHERE id = ?", (result, line))

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
