"""Nodes that fail together: what a level of them is, and where a site says they are to be found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_resil.core.errors import UsageError

AUTO, NONE, TOPOLOGY, FEATURE, FILE = "auto", "none", "topology", "feature", "file"
FILES = (".toml", ".conf", ".yaml", ".yml")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_MEND = "write auto, none, topology, topology:NAME, feature:rack=(.+) or file:/etc/slurm-resil/groups.toml"


@dataclass(frozen=True, kw_only=True)
class Level:
    """One way in which nodes fail together.

    Attributes:
        name: What the groups are, in a word: ``rack``, ``switch``, ``power``.
        groups: Group of each node; of one that is not in here nothing is known.
        minor: Nodes are spread over these as far as it goes, and nobody is warned where it does not: the upper levels
            of a network.
    """

    name: str
    groups: Mapping[str, str] = field(default_factory=dict)
    minor: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where failure groups come from.

    Attributes:
        kind: ``auto`` (Slurm's topology, if the site has one), ``none``, ``topology``, ``feature`` or ``file``.
        argument: Name of a topology (empty: the partition's), pattern of a feature, or path.
    """

    kind: str
    argument: str = ""

    @classmethod
    def parse(cls, text: str) -> Source:
        """Read one source.

        Raises:
            UsageError: It is none; says what would be one.
        """
        kind, colon, argument = text.partition(":")
        words = ""
        if kind in (AUTO, NONE) and not colon:
            return cls(kind=kind)
        if kind == TOPOLOGY:
            if colon and not _NAME.fullmatch(argument):
                words = f"{argument!r} is no name of a topology"
        elif kind == FEATURE:
            words = _pattern_fault(argument)
        elif kind == FILE:
            if not argument.startswith("/") or not argument.endswith(FILES):
                words = f"{argument!r} is no absolute path that ends with {', '.join(FILES)}"
        else:
            words = "that is no source of failure groups"
        if words:
            raise UsageError(f"{text!r}: {words}", mend=_MEND)
        return cls(kind=kind, argument=argument)

    def __str__(self) -> str:
        return f"{self.kind}:{self.argument}" if self.argument else self.kind


def _pattern_fault(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"{pattern!r} is no pattern: {error}"
    return (
        "" if groups == 1 else f"{pattern!r} needs one group in parentheses, that of the group's name, and has {groups}"
    )
