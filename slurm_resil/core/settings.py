"""What holds for one job: its environment over the site over the defaults; every value knows its source."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from slurm_resil.core import io_hints, units
from slurm_resil.core.config import PATH_VARIABLE, Site
from slurm_resil.core.errors import ConfigError, UsageError
from slurm_resil.core.protection import MOST_MEMBERS, Protection, contradiction
from slurm_resil.core.reading import MOST_SLOTS
from slurm_resil.core.retention import Best, Retention, parse_best, parse_last

T = TypeVar("T")

PREFIX = "SLURM_RESIL_"
SLOTS = 3  # of each rank: one is written, one is the newest, one more can be drained
MOST = 10**11  # iterations: what the SPANK plugin takes at most, too
KEEP_VARIABLES = tuple(PREFIX + name for name in ("KEEP_LAST", "KEEP_EVERY", "KEEP_INTERVAL", "KEEP_BEST"))
# what a person sets
VARIABLES = (
    *(PREFIX + name for name in ("BB_ROOT", "CAP", "ENGINE", "EVERY", "INTERVAL", "LEAD", "PREFIX", "RUN_ID")),
    *KEEP_VARIABLES,
    *(PREFIX + name for name in ("HINTS", "REDUNDANCY", "RETRY", "SET_SIZE", "SLOTS")),
    PATH_VARIABLE,
)
# what the launcher, the sandbox and the tests tell their children
_OWN = frozenset(
    PREFIX + name
    for name in (
        *("ATTEMPT", "CYCLE", "LAYOUT", "LEADER", "LOCAL_RANK", "NODES", "NODE_RANK", "RANKS_PER_NODE", "WORLD_SIZE"),
        "SLOT_COUNT",  # not what a person asks for, which the site may leave to nobody
        *("CACHE", "FAULT", "SANDBOX", "SANDBOX_NODE", "SANDBOX_OF"),
    )
)
_TESTS = f"{PREFIX}TEST_"


@dataclass(frozen=True, kw_only=True)
class Value(Generic[T]):
    """A value.

    Attributes:
        value: It.
        source: Variable, file with section and key, or ``default``.
    """

    value: T
    source: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a job.

    Attributes:
        bb_root: Where the directories of jobs are on a node.
        prefix_root: Where the directories of runs are.
        every: Iterations between checkpoints; None: no such cadence.
        interval_s: Seconds between checkpoints; None: no such cadence.
        lead_s: Time to save before a deadline, seconds; None: from measured times.
        cap_bytes_s: Limit of drains while training, bytes/s; None: none.
        retry_s: How long a drain waits for storage that refuses, in all and without getting on, seconds.
        hints: MPI-IO hints of drains.
        engine: ``HOST:PORT`` of the recovery engine; empty: none.
        keep_last: See :class:`slurm_resil.core.retention.Retention`; so for the other three.
        redundancy: How checkpoints are protected.
        set_size: Nodes that protect each other, about; None: by the failure groups.
        slots: Slots of each rank; None: the default, see :attr:`slot_count`.
    """

    bb_root: Value[str]
    prefix_root: Value[str]
    every: Value[int | None]
    interval_s: Value[float | None]
    lead_s: Value[float | None]
    cap_bytes_s: Value[float | None]
    retry_s: Value[float]
    hints: Value[Mapping[str, str]]
    engine: Value[str]
    keep_last: Value[int | None]
    keep_every: Value[int | None]
    keep_interval_s: Value[float | None]
    keep_best: Value[Best | None]
    redundancy: Value[Protection]
    set_size: Value[int | None]
    slots: Value[int | None]

    @property
    def slot_count(self) -> int:
        """Slots of each rank; where nodes protect each other one more, which can be encoded."""
        return self.slots.value or (SLOTS + 1 if self.redundancy.value.protects else SLOTS)

    @property
    def retention(self) -> Retention:
        """Which checkpoints of the run stay on the parallel file system."""
        return Retention(
            keep_last=self.keep_last.value,
            every_iterations=self.keep_every.value,
            every_s=self.keep_interval_s.value,
            best=self.keep_best.value,
        )

    @classmethod
    def from_env(cls, env: Mapping[str, str], site: Site) -> Settings:
        """Read the environment of a job.

        Raises:
            ConfigError: Variables that make no sense, or that the site does not leave to jobs; all at once.
        """
        read = _Reader(env, site)
        read.faults += strangers(env)
        prefix = site.prefix
        made = cls(
            bb_root=read.get("bb_root", "BB_ROOT", _path, "burst_buffer", "root", site.burst_buffer.root or _bb_root()),
            prefix_root=read.get("prefix", "PREFIX", _absolute, "prefix", "root", _prefix_root(env, site)),
            every=read.get("every", "EVERY", _count, "schedule", "every", site.schedule.every),
            interval_s=read.get("interval", "INTERVAL", _duration, "schedule", "interval", site.schedule.interval_s),
            lead_s=read.get("lead", "LEAD", _duration, "schedule", "lead", site.schedule.lead_s),
            cap_bytes_s=read.get("cap", "CAP", _rate, "drain", "cap", site.drain.cap_bytes_s),
            retry_s=read.get("retry", "RETRY", units.wait_s, "drain", "retry", site.drain.retry_s),
            hints=read.get("hints", "HINTS", io_hints.parse, "drain", "hints", site.drain.hints),
            engine=read.get("engine", "ENGINE", _address, "engine", "address", site.engine.address),
            keep_last=read.get("keep", "KEEP_LAST", _last, "prefix", "keep_last", prefix.keep_last),
            keep_every=read.get("keep", "KEEP_EVERY", _count, "prefix", "keep_every", prefix.keep_every),
            keep_interval_s=read.get(
                "keep", "KEEP_INTERVAL", _duration, "prefix", "keep_interval", prefix.keep_interval_s
            ),
            keep_best=read.get("keep", "KEEP_BEST", _best, "prefix", "keep_best", prefix.keep_best),
            redundancy=read.get(
                "redundancy", "REDUNDANCY", Protection.parse, "redundancy", "scheme", site.redundancy.scheme
            ),
            set_size=read.get("redundancy", "SET_SIZE", _members, "redundancy", "set_size", site.redundancy.set_size),
            slots=read.get("slots", "SLOTS", _slots, "burst_buffer", "slots", site.burst_buffer.slots),
        )
        odd = contradiction(made.redundancy.value, made.set_size.value)
        if odd:
            read.faults.append(f"{odd} (from {made.redundancy.source}; {made.set_size.source})")
        if read.faults:
            raise ConfigError("the environment makes no sense", faults=tuple(read.faults))
        return made


def strangers(env: Mapping[str, str]) -> list[str]:
    """What is wrong with variables that look like ours and are none: a typo would be a setting that does not hold."""
    faults = []
    for name in sorted(env):
        if not name.startswith(PREFIX) or name in VARIABLES or name in _OWN or name.startswith(_TESTS):
            continue
        known = [variable.removeprefix(PREFIX) for variable in VARIABLES]
        near = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1)
        meant = f"is {PREFIX}{near[0]} meant? If not, unset it" if near else "unset it"
        faults.append(f"{name}={env[name]!r} is no variable of slurm_resil: {meant}; there are {', '.join(VARIABLES)}")
    return faults


class _Reader:
    def __init__(self, env: Mapping[str, str], site: Site) -> None:
        self._env, self._site = env, site
        self.faults: list[str] = []

    def get(
        self, setting: str, variable: str, parse: Callable[[str], T], section: str, key: str, otherwise: T
    ) -> Value[T]:
        """The variable's value if it is set, else the site's or the default."""
        below = Value(value=otherwise, source=self._site.source(section, key))
        name = f"SLURM_RESIL_{variable}"
        text = self._env.get(name)
        if not text:
            return below
        try:
            value = parse(text)
        except UsageError as error:
            self.faults.append(f"{name}={error.message}; {error.mend}")
            return below
        # the launcher passes on what it found: the site's own value is no override
        if value == otherwise and setting not in self._site.security.user_may:
            return below
        if setting not in self._site.security.user_may:
            self.faults.append(
                f"{name}={text!r}: this site leaves {setting!r} to nobody ({self._site.path} [security] user_may); "
                f"unset it, {otherwise!r} holds"
            )
            return below
        return Value(value=value, source=name)


def _bb_root() -> str:
    return f"/dev/shm/slurm-resil-{os.getuid()}"  # noqa: S108 - 0700, by uid


def _prefix_root(env: Mapping[str, str], site: Site) -> str:
    root = site.prefix.root
    if root is None:
        return os.path.abspath(os.path.join(env.get("SLURM_SUBMIT_DIR") or os.getcwd(), ".slurm-resil"))
    if "{user}" in root:
        root = root.replace("{user}", _user(site))
    return root.replace("{uid}", str(os.getuid()))


def _user(site: Site) -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError as error:
        raise ConfigError(
            f"uid {os.getuid()} has no name, which {site.path} [prefix] root needs", mend="write {uid} there"
        ) from error


def _path(text: str) -> str:
    if not text.startswith("/"):
        raise UsageError(f"{text!r} is no absolute path", mend="as in /local/slurm-resil")
    return text


def _absolute(text: str) -> str:
    return os.path.abspath(text)


def _count(text: str) -> int | None:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:20]) < MOST:
        raise UsageError(f"{text!r} is not a whole number of iterations, from 1 to less than {MOST}", mend="as in 500")
    return int(text)


def _members(text: str) -> int | None:
    if not (text.isascii() and text.isdigit()) or not 2 <= int(text[:20]) <= MOST_MEMBERS:
        raise UsageError(f"{text!r} is no size of a set, from 2 to {MOST_MEMBERS}", mend="as in 8")
    return int(text)


def _slots(text: str) -> int | None:
    if not (text.isascii() and text.isdigit()) or not 2 <= int(text[:20]) <= MOST_SLOTS:
        raise UsageError(f"{text!r} is no number of slots, from 2 to {MOST_SLOTS}", mend="as in 3")
    return int(text)


def _last(text: str) -> int | None:
    return parse_last(text)


def _best(text: str) -> Best | None:
    return parse_best(text)


def _duration(text: str) -> float | None:
    return units.period_s(text)


def _address(text: str) -> str:
    units.host_port(text)
    return text


def _rate(text: str) -> float | None:
    size = units.size_bytes(text.strip().removesuffix("/s"))
    if size < 1:
        raise UsageError(f"{text!r} is no rate", mend="as in 2GB/s")
    return float(size)
