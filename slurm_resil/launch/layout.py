"""Which node gets which node_rank: pure, so that ranks keep their places when a node is replaced.

A rank's shard lies on the node that ran it, so after a requeue every known node must get its old node_rank back,
whatever order Slurm lists the nodes in; a spare takes the place that is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_resil.core.errors import UsageError

PORT_FIRST = 20_000
PORT_COUNT = 12_000  # up to 31,999: below the ports that Linux hands out by itself


def assign(previous: Sequence[str], available: Sequence[str], count: int) -> tuple[str, ...]:
    """Give node_ranks to nodes.

    Nodes that had a node_rank below ``count`` keep it. Other known nodes come next, then new ones; they fill the
    gaps from the lowest place up. With more nodes than places the last ones are left over.

    Args:
        previous: Nodes of the attempt before, by node_rank; empty for the first attempt.
        available: Nodes of this attempt, in Slurm's order.
        count: Number of places.

    Returns:
        Node names by node_rank, ``count`` of them.

    Raises:
        UsageError: Fewer nodes than places, or a node twice.
    """
    if len(set(available)) != len(available):
        raise UsageError(f"a node is listed twice: {', '.join(available)}")
    if not 0 < count <= len(available):
        raise UsageError(
            f"{count} nodes are wanted and the allocation has {len(available)}",
            mend="lower --nodes or ask sbatch for more",
        )
    places: list[str | None] = [None] * count
    present = set(available)
    for place, node in enumerate(previous[:count]):
        if node in present and node not in places:
            places[place] = node
    known = set(previous)
    rest = [node for node in available if node not in places]
    rest.sort(key=lambda node: node not in known)  # stable: known nodes first
    filler = iter(rest)
    return tuple(node if node is not None else next(filler) for node in places)


def rendezvous_port(job_id: int, attempt: int, cycle: int) -> int:
    """Port of the ranks' rendezvous: another one for every launch, so that a socket in TIME_WAIT is never met.

    Jobs that share a node and start together differ too, as job ids are next to each other.
    """
    return PORT_FIRST + (job_id * 97 + attempt * 13 + cycle) % PORT_COUNT
