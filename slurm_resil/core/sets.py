"""Which nodes protect each other, as the launcher has written it for movers and ranks.

File ``sets.json`` in the run's directory::

    {"version": 1, "sets": [["n1", "n5"], ["n2", "n6"]], "scheme": "rs"}

``scheme`` is the strongest one that the job uses; it may be missing in a file that a person has written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import ConfigError, DataError, UsageError
from slurm_resil.core.schemes import Scheme

VERSION = 1
PARITIES = 3  # on a node at once: of the two newest checkpoints that are protected, and of the one that becomes so
_SINGLE = Scheme(kind="single", losses=0)
_MEND = 'write {"version": 1, "sets": [["n1", "n5"], ["n2", "n6"]]} with every node of the job once'


def parity_bytes(scheme: Scheme, members: int, nbytes: int) -> int:
    """Bytes of parity or copies that a node of a set holds for one checkpoint, at most.

    Args:
        scheme: Scheme.
        members: Nodes of the set.
        nbytes: Largest state of a node of the set.
    """
    losses = min(scheme.losses, members - 1)
    if losses <= 0:
        return 0
    chunks = 1 if scheme.kind == "partner" else members - losses
    return losses * -(-nbytes // chunks)


@dataclass(frozen=True, kw_only=True)
class NodeSets:
    """Sets of nodes.

    Attributes:
        sets: Names of the members of each.
        scheme: The strongest scheme.
    """

    sets: tuple[tuple[str, ...], ...]
    scheme: Scheme = _SINGLE

    @property
    def smallest(self) -> int:
        """Members of the smallest set: its nodes hold most parity."""
        return min(map(len, self.sets), default=1)

    def parity_bytes(self, nbytes: int) -> int:
        """Bytes that a burst buffer must have for parity, at most.

        Args:
            nbytes: State of a node.
        """
        return PARITIES * parity_bytes(self.scheme, self.smallest, nbytes)


def load(path: str) -> NodeSets:
    """Read a file of sets.

    Raises:
        ConfigError: It does not exist, or is none; says what would be one.
        OSError: The file system failed.
    """
    try:
        raw = fsio.read_json(path)
    except FileNotFoundError:
        raise ConfigError(f"the file of sets {path} does not exist", mend=_MEND, path=path) from None
    except DataError as error:
        raise ConfigError(error.message, mend=_MEND, path=path) from error
    named = raw.get("sets") if isinstance(raw, dict) and raw.get("version") == VERSION else None
    if not isinstance(named, list) or not all(
        isinstance(one, list) and one and all(isinstance(name, str) for name in one) for one in named
    ):
        raise ConfigError(f"{path} names no sets (version {VERSION})", mend=_MEND, path=path)
    names = [name for one in named for name in one]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"{path}: {', '.join(twice[:8])} named twice", mend=_MEND, path=path)
    try:
        scheme = Scheme.parse(str(raw.get("scheme", "single")))
    except UsageError as error:
        raise ConfigError(f"{path}: scheme is {raw['scheme']!r}: {error.message}", mend=_MEND, path=path) from error
    return NodeSets(sets=tuple(map(tuple, named)), scheme=scheme)


def of_run(run_dir: str) -> NodeSets | None:
    """Sets of a run; None if there are none that can be read: whoever needs them for sure calls :func:`load`."""
    with contextlib.suppress(ConfigError, OSError):
        return load(paths.sets(run_dir))
    return None


def save(run_dir: str, sets: Sequence[Sequence[str]], scheme: Scheme) -> None:
    """Publish the sets of a run.

    Raises:
        OSError: Storage refused.
    """
    document = {"version": VERSION, "sets": [list(one) for one in sets], "scheme": str(scheme)}
    fsio.write_json(paths.sets(run_dir), document)


def remove(run_dir: str) -> None:
    """Nothing is protected any more.

    Raises:
        OSError: Storage refused.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(paths.sets(run_dir))
