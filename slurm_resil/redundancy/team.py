"""The movers of a job: which node each is, its place, and which sets they form."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_resil.comm.base import Communicator, agreed, allgather_json
from slurm_resil.core import layout
from slurm_resil.core import sets as core_sets
from slurm_resil.core.errors import ConfigError
from slurm_resil.core.schemes import Scheme
from slurm_resil.redundancy import sets as making


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of the job.

    Attributes:
        name: As Slurm calls it.
        place: Its node_rank.
    """

    name: str
    place: int


def nodes(comm: Communicator, run_dir: str, env: Mapping[str, str]) -> list[Node]:
    """Nodes of all movers, by rank. Collective.

    Places are those of the run's layout; where there is none, a mover's rank is its place.

    Raises:
        ConfigError: A node is not in the layout, or two movers have one place.
    """
    name, place = env.get("SLURMD_NODENAME") or os.uname().nodename, comm.rank
    with agreed(comm, f"reading the layout in {run_dir}"):
        places = layout.load(run_dir)
        if places is not None:
            if name not in places.nodes:
                raise ConfigError(
                    f"node {name} has no place in the run: its layout has {', '.join(places.nodes[:8])}",
                    mend="start movers on the nodes of the run only, by the launcher",
                )
            place = places.node_rank(name)
    found = [Node(name=one[0], place=one[1]) for one in allgather_json(comm, [name, place])]
    seen: dict[int, str] = {}
    for one in found:
        if one.place in seen:
            raise ConfigError(
                f"two movers have place {one.place}: on {seen[one.place]} and on {one.name}",
                mend="start one mover on each node",
            )
        seen[one.place] = one.name
    return found


def sets(
    comm: Communicator, found: Sequence[Node], path: str | None, *, size: int | None, scheme: Scheme
) -> list[list[int]]:
    """Sets, each a list of the members' ranks among the movers. Collective.

    Args:
        comm: Movers.
        found: Nodes by rank.
        path: File that names them; None: made here, as if every node failed alone.
        size: Members wanted in a set, for sets that are made here.
        scheme: What the sets are for.

    Raises:
        ConfigError: The file does not name every node once.
    """
    if path is None:
        names = [node.name for node in sorted(found, key=lambda node: node.place)]
        return _numbered(making.make(names, scheme=scheme, size=size).members, found)
    result: list[list[int]] = []
    with agreed(comm, f"reading {path}"):
        named = core_sets.load(path).sets
        odd = sorted({name for one in named for name in one} ^ {node.name for node in found})
        if odd:
            raise ConfigError(
                f"{path}: {', '.join(odd[:8])} missing, or unknown here",
                mend="write every node of the job once, as SLURMD_NODENAME has it",
                path=path,
            )
        result = _numbered(named, found)
    return result


def _numbered(named: Sequence[Sequence[str]], found: Sequence[Node]) -> list[list[int]]:
    ranks = {node.name: rank for rank, node in enumerate(found)}
    return [[ranks[name] for name in one] for one in named]
