"""Logs as JSON lines: one event name, which is a constant, and fields."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any, TextIO


class JsonLines(logging.Formatter):
    """Format a record as one JSON object: time (Unix seconds), level, logger, event and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one line."""
        entry: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            "pid": os.getpid(),
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            entry["error"] = repr(record.exc_info[1])
        return json.dumps(entry, default=str)


def configure(stream: TextIO | None = None, *, level: int = logging.INFO) -> None:
    """Send this package's logs to a stream (default: standard error). Only commands, hooks and the agent call it."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger("slurm_resil")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


def event(logger: logging.Logger, name: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Log an event with fields."""
    logger.log(level, name, extra={"fields": fields})


def now_s() -> float:
    """Wall clock, Unix seconds; for records only, never for durations."""
    return time.time()
