"""The site's configuration, ``site.toml``: read once, checked as a whole, all faults told at once.

No file means working defaults for one host. What a key may hold, its example and its default stand in one place, the
dataclass of its section.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from slurm_resil.core import reading
from slurm_resil.core.errors import ConfigError
from slurm_resil.core.failure_groups import AUTO, Source
from slurm_resil.core.protection import USUAL, Protection, contradiction
from slurm_resil.core.reading import JOB_SETTINGS
from slurm_resil.core.retention import Best

DEFAULT_PATH = "/etc/slurm-resil/site.toml"
PATH_VARIABLE = "SLURM_RESIL_SITE"
RETRY_S = 60.0


def _key(default: Any, read: Callable[[object], object], example: str, name: str = "") -> Any:
    return dataclasses.field(default=default, metadata={"read": read, "example": example, "name": name})


@dataclass(frozen=True, kw_only=True)
class BurstBuffer:
    """``[burst_buffer]``: node-local storage.

    Attributes:
        root: Directory on every node, owned by root; None: one per user in ``/dev/shm``.
        all_jobs: The prolog makes directories for jobs without ``--resil`` too.
        log: File of prolog and epilog; empty: standard error, which slurmd logs.
        slots: Checkpoints of each rank that there is room for; None: 3, or 4 where nodes protect each other.
        keep_s: How long what is nowhere else is kept on a node after its job's end, seconds; None: until it is durable.
    """

    root: str | None = _key(None, reading.fixed_path, '"/local/slurm-resil"')
    all_jobs: bool = _key(False, reading.switch, "false")
    log: str = _key("", reading.fixed_path, '"/var/log/slurm-resil-hooks.jsonl"')
    slots: int | None = _key(None, reading.slots, "3")
    keep_s: float | None = _key(None, reading.duration, '"7d"', "keep")


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """``[prefix]``: the parallel file system.

    Attributes:
        root: Directory of the runs; ``{user}`` and ``{uid}`` stand for the job's owner; None: where it was submitted.
        keep_last: How many of the newest checkpoints of a run stay; this and the following ones None: all of them.
        keep_every: Those stay whose iteration is a multiple of it.
        keep_interval_s: The first of each so many seconds stays.
        keep_best: The best by a metric stay.
    """

    root: str | None = _key(None, reading.user_path, '"/scratch/{user}/slurm-resil"')
    keep_last: int | None = _key(None, reading.keep_last, "3")
    keep_every: int | None = _key(None, reading.count(1), "10000")
    keep_interval_s: float | None = _key(None, reading.duration, '"6h"', "keep_interval")
    keep_best: Best | None = dataclasses.field(
        default=None, metadata={"read": reading.keep_best, "example": '"loss:min"', "name": ""}
    )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """``[schedule]``: when to save.

    Attributes:
        lead_s: Time to save before a deadline, seconds; None: from measured times.
        every: Iterations between checkpoints; None: no cadence by iterations.
        interval_s: Seconds between checkpoints; None: no cadence by time.
    """

    lead_s: float | None = _key(None, reading.duration, '"90s"', "lead")
    every: int | None = _key(None, reading.count(1), "500")
    interval_s: float | None = _key(None, reading.duration, '"10min"', "interval")


@dataclass(frozen=True, kw_only=True)
class Redundancy:
    """``[redundancy]``: what protects checkpoints from the loss of nodes before they are drained.

    Attributes:
        scheme: How checkpoints are protected, see :mod:`slurm_resil.core.protection`.
        set_size: Nodes that protect each other, about; None: 4 to 8, by the failure groups.
        failure_groups: Where it is known which nodes fail together, that which matters most first.
    """

    scheme: Protection = dataclasses.field(
        default=USUAL, metadata={"read": reading.protection, "example": '"xor,rs:2/10"', "name": ""}
    )
    set_size: int | None = _key(None, reading.members, "8")
    failure_groups: tuple[Source, ...] = _key((Source(kind=AUTO),), reading.sources, '"feature:rack=(.+)"')


@dataclass(frozen=True, kw_only=True)
class Drain:
    """``[drain]``: from the burst buffer to the parallel file system, and back.

    Attributes:
        cap_bytes_s: Limit while training, all nodes of a job together, bytes/s; None: none.
        retry_s: Waits for storage that refuses, in all and without getting on, before a drain gives up, seconds.
        fetch: Whether a drained checkpoint is staged before ranks restore it; ``auto``: on two nodes or more.
        hints: MPI-IO hints by name.
        buffer_bytes: Memory of each mover for data, bytes; None: the mover's own.
        gather: Movers put narrow parts of a tensor together themselves; False: that is left to MPI, by its hints.
        late: Who makes durable what a job that is gone has left on its nodes: ``epilog``, a process that the epilog
            starts for the job's owner; ``job``, a job that the launcher submits for it; ``off``, nobody. By default
            the epilog: it needs nothing but itself, and submits nothing in anybody's name.
        late_limit_s: Longest time that the epilog's process may take, seconds.
    """

    cap_bytes_s: float | None = _key(None, reading.rate, '"2GB/s"', "cap")
    retry_s: float = _key(RETRY_S, reading.patience, '"5min"', "retry")
    fetch: str = _key("auto", reading.one_of("auto", "on", "off"), '"auto"')
    hints: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: MappingProxyType({}),
        metadata={"read": reading.hints, "example": "{ striping_factor = 8 }", "name": ""},
    )
    buffer_bytes: int | None = _key(None, reading.buffer, '"64MiB"', "buffer")
    gather: bool = _key(True, reading.switch, "true")
    late: str = _key("epilog", reading.one_of("epilog", "job", "off"), '"epilog"')
    late_limit_s: float = _key(3600.0, reading.duration, '"1h"', "late_limit")


@dataclass(frozen=True, kw_only=True)
class Requeue:
    """``[requeue]``: how often a job may come back.

    Attributes:
        max_restarts: Restarts without progress.
        max_idle_attempts: Attempts in a row that gain no iteration, before the job is held.
    """

    max_restarts: int = _key(3, reading.count(0), "3")
    max_idle_attempts: int = _key(3, reading.count(1), "3")


@dataclass(frozen=True, kw_only=True)
class Spares:
    """``[spares]``: nodes held to replace others.

    Attributes:
        reservation: Slurm reservation that holds them; empty: there are none.
    """

    reservation: str = _key("", reading.name, '"spares"')


@dataclass(frozen=True, kw_only=True)
class Engine:
    """``[engine]``: the recovery engine.

    Attributes:
        address: ``HOST:PORT`` where it listens; empty: there is none.
        mode: ``observe`` or ``act``.
        db: Its database.
    """

    address: str = _key("", reading.address, '"ctl.example.org:7878"')
    mode: str = _key("observe", reading.one_of(*reading.MODES), '"observe"')
    db: str = _key("/var/lib/slurm-resil/engine.db", reading.fixed_path, '"/var/lib/slurm-resil/engine.db"')


@dataclass(frozen=True, kw_only=True)
class Security:
    """``[security]``: who may what.

    Attributes:
        user_may: Settings that a job may have of its own.
    """

    user_may: tuple[str, ...] = _key(JOB_SETTINGS, reading.settings, '["every", "interval", "lead"]')


@dataclass(frozen=True, kw_only=True)
class Site:
    """A site's configuration.

    Attributes:
        path: The file that was read; empty: none, everything is a default.
        given: ``section.key`` of everything that the file says.
    """

    path: str = ""
    given: frozenset[str] = frozenset()
    burst_buffer: BurstBuffer = BurstBuffer()
    prefix: Prefix = Prefix()
    schedule: Schedule = Schedule()
    redundancy: Redundancy = Redundancy()
    drain: Drain = Drain()
    requeue: Requeue = Requeue()
    spares: Spares = Spares()
    engine: Engine = Engine()
    security: Security = Security()

    def source(self, section: str, key: str) -> str:
        """Where a value comes from: the file with section and key, or ``default``."""
        return f"{self.path} [{section}] {key}" if f"{section}.{key}" in self.given else "default"


_SECTIONS: dict[str, type[Any]] = {
    "burst_buffer": BurstBuffer,
    "prefix": Prefix,
    "schedule": Schedule,
    "redundancy": Redundancy,
    "drain": Drain,
    "requeue": Requeue,
    "spares": Spares,
    "engine": Engine,
    "security": Security,
}


def keys(section: str) -> dict[str, dataclasses.Field[Any]]:
    """Keys of a section of ``site.toml``, with the field each is read into."""
    return {field.metadata["name"] or field.name: field for field in dataclasses.fields(_SECTIONS[section])}


def load(env: Mapping[str, str], path: str | None = None) -> Site:
    """Read the site's configuration.

    Args:
        env: Environment; ``SLURM_RESIL_SITE`` names the file if ``path`` does not.
        path: The file.

    Raises:
        ConfigError: A file that was named is not there, or the file has faults; all of them at once.
    """
    named = path or env.get(PATH_VARIABLE)
    where = named or DEFAULT_PATH
    try:
        with open(where, "rb") as file:
            raw = file.read()
    except FileNotFoundError as error:
        if not named:
            return Site()
        raise ConfigError(
            f"the site's configuration {where} does not exist",
            mend=f"write it, or leave out --site and {PATH_VARIABLE}: the defaults work without a file",
            path=where,
        ) from error
    except IsADirectoryError as error:
        raise ConfigError(
            f"{where} is a directory, not the site's configuration",
            mend=f"name the file in it, as in {os.path.join(where, 'site.toml')}",
            path=where,
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot read {where}: {error.strerror}", mend="make it readable for all", path=where
        ) from error
    try:
        text = raw.decode()
        document = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        mend = 'a line is key = value below a [section]; texts, times and sizes are in quotes, as in lead = "90s"'
        raise ConfigError(
            f"{where} is not TOML", mend=mend, faults=(_misread(raw, error, where),), path=where
        ) from error
    return parse(document, where)


def _misread(raw: bytes, error: UnicodeDecodeError | tomllib.TOMLDecodeError, where: str) -> str:
    """Say where a file stopped being TOML, and show that line."""
    words = str(error)
    if isinstance(error, UnicodeDecodeError):
        line, words = raw.count(b"\n", 0, error.start) + 1, "it is not UTF-8"
    elif place := re.search(r" \(at line (\d+), column \d+\)", words):
        line, words = int(place[1]), words.replace(place[0], "")
    else:
        line = len(raw.splitlines())  # "at end of document"
    lines = raw.splitlines()
    shown = lines[line - 1].decode(errors="replace").strip() if 0 < line <= len(lines) else ""
    return f"{where}, line {line}: {words}, at {shown!r}"


def parse(document: Mapping[str, object], path: str) -> Site:
    """Check a document and make a Site of it.

    Raises:
        ConfigError: It has faults; all of them at once.
    """
    faults: list[str] = []
    given: set[str] = set()
    sections = {}
    for name, table in document.items():
        if name not in _SECTIONS:
            faults.append(f"{path}: [{name}] is unknown; sections are {', '.join(_SECTIONS)}")
        elif not isinstance(table, dict):
            faults.append(f"{path}: {name} is {table!r}, a section is needed, as in [{name}]")
        else:
            sections[name] = _section(name, table, path, given, faults)
    # what is there but wrong is told as wrong, not as missing too
    said = {f"{name}.{key}" for name, table in document.items() if isinstance(table, dict) for key in table}
    site = Site(path=path, given=frozenset(given), **sections)
    faults += [f"{path}: {words}" for words in _contradictions(site, said)]
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ConfigError(f"{path} has {count}", faults=tuple(faults), path=path)
    return site


def _section(name: str, table: Mapping[str, object], path: str, given: set[str], faults: list[str]) -> Any:
    known = keys(name)
    values = {}
    for key, value in table.items():
        if key not in known:
            faults.append(f"{path}: [{name}] {key} is unknown; keys are {', '.join(known)}")
            continue
        example = known[key].metadata["example"]
        try:
            values[known[key].name] = known[key].metadata["read"](value)
            given.add(f"{name}.{key}")
        except reading.BadError as error:
            faults.append(f"{path}: [{name}] {key} is {value!r}: {error}, as in {key} = {example}")
    return _SECTIONS[name](**values)


def _inside(path: str, other: str) -> bool:
    return path == other or path.startswith(other + "/")


def _contradictions(site: Site, said: set[str]) -> list[str]:
    found = []
    local, shared = site.burst_buffer.root, site.prefix.root
    if local and shared and (_inside(local, shared) or _inside(shared, local)):
        found.append(
            f"[burst_buffer] root is {local!r} and [prefix] root is {shared!r}: one is node-local, the other shared "
            'by all nodes, as in "/local/slurm-resil" and "/scratch/{user}/slurm-resil"'
        )
    if site.burst_buffer.all_jobs and "burst_buffer.root" not in said:
        found.append(
            "[burst_buffer] all_jobs is true without a root: the prolog needs a directory of the site, "
            'as in root = "/local/slurm-resil"'
        )
    size_fault = contradiction(site.redundancy.scheme, site.redundancy.set_size)
    if size_fault:
        found.append(f"[redundancy] {size_fault}")
    if site.engine.mode == "act" and "engine.address" not in said:
        found.append("[engine] mode is 'act' without an address: nobody reaches it, as in address = \"ctl:7878\"")
    if site.spares.reservation and "engine.address" not in said:
        found.append(
            f"[spares] reservation is {site.spares.reservation!r} without an [engine] address: only the engine "
            'uses spares, as in address = "ctl:7878"'
        )
    return found
