"""Durations, sizes and addresses as people write them, parsed at the edge."""

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
LONGEST_S = 366 * 86400.0
_ADDRESS = re.compile(r"(?:([A-Za-z0-9._-]+)|\[([0-9A-Fa-f:.]+)\]):([0-9]{1,5})")
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


def period_s(text: str) -> float:
    """Parse a duration that something is done after, or before: more than nothing, and a year at most.

    Raises:
        UsageError: It is none.
    """
    seconds = duration_s(text)
    if not 0 < seconds <= LONGEST_S:
        what = "no time at all" if seconds <= 0 else "longer than a year"
        raise UsageError(f"{text!r} is {what}", mend="write 45s, 10min, 1h30m or 1-12:00:00")
    return seconds


def wait_s(text: str) -> float:
    """Parse a duration that something is waited for: none at all (``0s``), and a year at most.

    Raises:
        UsageError: It is none.
    """
    seconds = duration_s(text)
    if seconds > LONGEST_S:
        raise UsageError(f"{text!r} is longer than a year", mend="write 45s, 10min, 1h30m or 1-12:00:00")
    return seconds


def host_port(text: str) -> tuple[str, int]:
    """Parse ``host:port``, ``address:port`` or ``[IPv6 address]:port``.

    Raises:
        UsageError: It is none of these; port 0 is none that anybody could connect to.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise UsageError(f"{text!r} is no HOST:PORT", mend="write ctl1:7321, 10.0.0.1:7321 or [fd00::1]:7321")
    return match[1] or match[2], int(match[3])


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
