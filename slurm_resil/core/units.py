"""Durations and sizes as people write them, parsed at the edge into seconds and bytes."""

from __future__ import annotations

import re

from slurm_resil.core.errors import UsageError

_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for tail, base in (("b", 1000), ("ib", 1024), ("", 1024))
}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*")
_CLOCK = re.compile(r"^(?:(\d+)-)?(\d+):(\d{2})(?::(\d{2}))?$")
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([a-z]*)$")


def duration_s(text: str) -> float:
    """Parse ``45s``, ``10min``, ``1h30m``, ``250ms`` or Slurm's ``[days-]hours:minutes[:seconds]``.

    Returns:
        Seconds, not negative.

    Raises:
        UsageError: It is none of these; a bare number is refused, because its unit would be a guess.
    """
    plain = text.strip().lower()
    clock = _CLOCK.match(plain)
    if clock:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    total, at = 0.0, 0
    while at < len(plain):
        part = _PART.match(plain, at)
        if part is None or part[2] not in _DURATION_UNITS:
            break
        total += float(part[1]) * _DURATION_UNITS[part[2]]
        at = part.end()
    if not plain or at < len(plain):
        raise UsageError(f"{text!r} is not a duration", mend="write 45s, 10min, 1h30m or 1-12:00:00")
    return total


def size_bytes(text: str) -> int:
    """Parse ``4MiB``, ``2GB``, ``512k`` (binary) or a bare number of bytes.

    Returns:
        Bytes, not negative.

    Raises:
        UsageError: It is none of these.
    """
    match = _SIZE.match(text.strip().lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise UsageError(f"{text!r} is not a size", mend="write 4MiB, 2GB or a number of bytes")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])
