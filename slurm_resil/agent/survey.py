"""What the ranks of a cycle restore from: pure, apart from reading the names in the run's directory.

An iteration can be restored when every rank has a sealed shard of it on the node where that rank is placed, all of them
written by one attempt, or when it is durable on the parallel file system. The newest such one is taken, for all ranks;
a rank that has its shard here, of the attempt that the drained file is of, reads that, the others read the drained
file. If the run has one node, and all shards that another number of ranks has sealed lie there, all ranks can read
those. An artefact that was found bad is never a candidate again.

The attempt matters because a run that goes back to an older iteration comes to the newer ones again: a node that was
lost may come back with shards of the first time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from slurm_resil.agent.protocol import Source
from slurm_resil.core import paths

DRAINED = -1  # in place of a rank: the drained file
SHARDS = -2  # the shards of all ranks, when there were more or fewer


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A decision.

    Attributes:
        iteration: Iteration to restore, 0 for a fresh start.
        sources: One per rank.
        everywhere: Iterations of which every rank has a shard.
    """

    iteration: int
    sources: tuple[Source, ...]
    everywhere: frozenset[int]

    @property
    def complete(self) -> int:
        """Newest iteration of which every rank has a shard, 0 for none."""
        return max(self.everywhere, default=0)


def choose(
    shards: Mapping[int, Mapping[int, int]],
    durable: Collection[int],
    bad: Collection[tuple[int, int]],
    world_size: int,
    *,
    drained_by: Callable[[int], int | None],
    whole: Collection[int] = (),
) -> Choice:
    """Decide.

    Args:
        shards: Sealed iterations by rank, each on that rank's node, with the attempts that wrote them.
        durable: Iterations that are durable.
        bad: (iteration, rank) of artefacts that must not be used; rank ``DRAINED`` means the drained file,
            ``SHARDS`` one of ``whole``.
        world_size: Number of ranks.
        drained_by: Attempt whose shards the drained file of an iteration was made of, None if that cannot be told.
        whole: Iterations of which all shards of another number of ranks are where all ranks are.
    """
    gone = set(bad)
    good = [
        {one: attempt for one, attempt in shards.get(rank, {}).items() if (one, rank) not in gone}
        for rank in range(world_size)
    ]
    everywhere = {one for one, attempt in good[0].items() if all(here.get(one) == attempt for here in good)}
    files = {one for one in durable if (one, DRAINED) not in gone}
    others = {one for one in whole if (one, SHARDS) not in gone}
    iteration = max(everywhere | files | others, default=0)
    sources: list[Source] = ["local"] * world_size
    if iteration in others - everywhere:
        sources = ["shards"] * world_size
    elif iteration and iteration not in everywhere:
        attempt = drained_by(iteration)
        sources = ["local" if attempt is not None and here.get(iteration) == attempt else "drained" for here in good]
    if not iteration:
        sources = ["fresh"] * world_size
    return Choice(iteration=iteration, sources=tuple(sources), everywhere=frozenset(everywhere))


def drained_iterations(run_dir: str) -> set[int]:
    """Iterations with a published drained manifest.

    Raises:
        OSError: The directory cannot be read: not the same as that there is nothing.
    """
    found = (paths.parse_drained(name) for name in os.listdir(run_dir))
    return {iteration for iteration in found if iteration is not None}
