"""What the ranks of a cycle restore from: pure, apart from reading the names in the run's directory.

An iteration can be restored when every rank has a sealed shard of it on the node where that rank is placed, or when it
is durable on the parallel file system. The newest such one is taken, for all ranks; a rank that has its shard here
reads that, the others read the drained file. An artefact that was found bad is never a candidate again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass

from slurm_resil.agent.protocol import Source
from slurm_resil.core import paths

DRAINED = -1  # in place of a rank: the drained file


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A decision.

    Attributes:
        iteration: Iteration to restore, 0 for a fresh start.
        sources: One per rank.
        complete: Newest iteration of which every rank has a shard, 0 for none.
    """

    iteration: int
    sources: tuple[Source, ...]
    complete: int


def choose(
    shards: Mapping[int, Set[int]], durable: Collection[int], bad: Collection[tuple[int, int]], world_size: int
) -> Choice:
    """Decide.

    Args:
        shards: Sealed iterations by rank, each on that rank's node.
        durable: Iterations that are durable.
        bad: (iteration, rank) of artefacts that must not be used; rank ``DRAINED`` means the drained file.
        world_size: Number of ranks.
    """
    gone = set(bad)
    good = [{one for one in shards.get(rank, set()) if (one, rank) not in gone} for rank in range(world_size)]
    everywhere = set.intersection(*good) if good else set()
    files = {one for one in durable if (one, DRAINED) not in gone}
    complete = max(everywhere, default=0)
    iteration = max(everywhere | files, default=0)
    sources: list[Source] = ["local" if iteration in here else "drained" for here in good]
    if not iteration:
        sources = ["fresh"] * world_size
    return Choice(iteration=iteration, sources=tuple(sources), complete=complete)


def drained_iterations(run_dir: str) -> set[int]:
    """Iterations with a published drained manifest.

    Raises:
        OSError: The directory cannot be read: not the same as that there is nothing.
    """
    found = (paths.parse_drained(name) for name in os.listdir(run_dir))
    return {iteration for iteration in found if iteration is not None}
