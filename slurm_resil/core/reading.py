"""What reads the values of ``site.toml``: each takes what TOML gave, and says what is needed if that cannot be."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from slurm_resil.core import io_hints, units
from slurm_resil.core.errors import UsageError
from slurm_resil.core.failure_groups import Source
from slurm_resil.core.protection import MOST_MEMBERS, Protection
from slurm_resil.core.retention import ALL, Best, parse_best

MODES = ("observe", "act")
# what [security] user_may can name: settings of a job, see core.settings
JOB_SETTINGS = (
    *("bb_root", "prefix", "every", "interval", "lead", "cap", "retry", "hints"),
    *("engine", "keep", "redundancy", "slots"),
)
MOST_SLOTS = 16

_PLACEHOLDER = re.compile(r"\{[^}]*\}?")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


class BadError(Exception):
    """A value that cannot be; the text says what is needed instead."""


def path(value: object) -> str:
    """An absolute path."""
    if not isinstance(value, str) or not value.startswith("/"):
        raise BadError("an absolute path is needed")
    if any(ord(char) < 32 for char in value):
        raise BadError("a path has no control characters")
    plain = os.path.normpath(value)
    if plain == "/":
        raise BadError("the root of the file system is no directory for this")
    return plain


def fixed_path(value: object) -> str:
    """One that is the same for all users."""
    plain = path(value)
    if _PLACEHOLDER.search(plain):
        raise BadError("this path is the same for all users: no {user} or {uid} here")
    return plain


def user_path(value: object) -> str:
    """One that may name the user."""
    plain = path(value)
    odd = sorted(set(_PLACEHOLDER.findall(plain)) - {"{user}", "{uid}"})
    if odd:
        raise BadError(f"{', '.join(odd)} means nothing here, only {{user}} and {{uid}} do")
    return plain


def duration(value: object) -> float:
    """Seconds."""
    if not isinstance(value, str):
        raise BadError("a duration is needed, in quotes and with its unit")
    try:
        return units.period_s(value)
    except UsageError as error:
        raise BadError("a duration is needed, with its unit, more than nothing and a year at most") from error


def patience(value: object) -> float:
    """Seconds, or none at all."""
    try:
        return units.wait_s(value if isinstance(value, str) else "")
    except UsageError as error:
        raise BadError("a duration is needed, in quotes and with its unit, a year at most") from error


def rate(value: object) -> float:
    """Bytes per second."""
    if not isinstance(value, str) or not value.rstrip().endswith("/s"):
        raise BadError("bytes per second are needed, in quotes and with /s at the end")
    try:
        size = units.size_bytes(value.rstrip().removesuffix("/s"))
    except UsageError as error:
        raise BadError("bytes per second are needed") from error
    if size < 1:
        raise BadError("at least one byte per second is needed")
    return float(size)


def count(least: int) -> Callable[[object], int]:
    """A whole number from a least one."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadError(f"a whole number from {least} is needed")
        return value

    return read


def keep_last(value: object) -> int:
    """A number of checkpoints, or all."""
    return ALL if value == "all" else count(1)(value)


def keep_best(value: object) -> Best:
    """A metric with its direction."""
    try:
        return parse_best(value if isinstance(value, str) else "")
    except UsageError as error:
        raise BadError("a metric with its direction is needed") from error


def protection(value: object) -> Protection:
    """Redundancy schemes."""
    try:
        return Protection.parse(value if isinstance(value, str) else "")
    except UsageError as error:
        raise BadError(f"{error.message}; {error.mend}") from error


def members(value: object) -> int:
    """Size of a set."""
    if count(2)(value) > MOST_MEMBERS:
        raise BadError(f"a whole number from 2 to {MOST_MEMBERS} is needed")
    return count(2)(value)


def slots(value: object) -> int:
    """Number of slots."""
    if not 2 <= count(2)(value) <= MOST_SLOTS:
        raise BadError(f"a whole number from 2 to {MOST_SLOTS} is needed")
    return count(2)(value)


def sources(value: object) -> tuple[Source, ...]:
    """Sources of failure groups."""
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise BadError("a source of failure groups is needed, or a list of them")
    try:
        found = tuple(Source.parse(str(text)) for text in texts)
    except UsageError as error:
        raise BadError(f"{error.message}; {error.mend}") from error
    if len(found) > 1 and any(one.kind in ("auto", "none") for one in found):
        raise BadError("auto and none stand alone")
    return found


def switch(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise BadError("true or false is needed")
    return value


def name(value: object) -> str:
    """A plain name."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise BadError("a name of letters, digits and . _ - is needed")
    return value


def address(value: object) -> str:
    """``HOST:PORT``."""
    try:
        units.host_port(value if isinstance(value, str) else "")
    except UsageError as error:
        raise BadError("HOST:PORT is needed") from error
    return str(value)


def one_of(*words: str) -> Callable[[object], str]:
    """One of some words."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise BadError(f"one of {', '.join(words)} is needed")
        return value

    return read


def buffer(value: object) -> int:
    """Memory of a mover, bytes."""
    with contextlib.suppress(UsageError):
        size = units.size_bytes(value if isinstance(value, str) else "")
        if 1 << 20 <= size <= 1 << 30:
            return size
    raise BadError("a size from 1MiB to 1GiB is needed, in quotes and with its unit")


def hints(value: object) -> Mapping[str, str]:
    """MPI-IO hints by name."""
    if not isinstance(value, dict):
        raise BadError("a table of MPI-IO hints is needed")
    kinds = {name: isinstance(hint, str) or type(hint) is int for name, hint in value.items()}
    faults = [io_hints.fault(name, str(hint) if kinds[name] else "") for name, hint in value.items()]
    if any(faults):
        raise BadError("; ".join(filter(None, faults)))
    return MappingProxyType({name: str(hint) for name, hint in value.items()})


def settings(value: object) -> tuple[str, ...]:
    """Names of a job's settings."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadError("a list of names is needed")
    odd = [item for item in value if item not in JOB_SETTINGS]
    if odd:
        raise BadError(f"{', '.join(map(repr, odd))} cannot be named here, only {', '.join(JOB_SETTINGS)}")
    return tuple(dict.fromkeys(value))
