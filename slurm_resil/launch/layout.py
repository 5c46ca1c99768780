"""Which node holds which node_rank: pure, so that ranks keep their places when a node is replaced.

A rank's shard lies on the node that ran it, so after a requeue every known node must get its old node_rank back,
whatever order Slurm lists the nodes in; a spare takes the place that is missing.

File ``layout.json`` in the run's directory::

    {"version": 1, "attempt": 2, "nodes": ["n1", "n5", "n3"], "ranks_per_node": 4}

The index in ``nodes`` is the node_rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError, UsageError

VERSION = 1
PORT_FIRST = 20_000
PORT_COUNT = 12_000  # up to 31,999: below the ports that Linux hands out by itself


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Places of the ranks.

    Attributes:
        nodes: Node names; the index is the node_rank.
        ranks_per_node: Ranks on each node.
    """

    nodes: tuple[str, ...]
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.nodes) * self.ranks_per_node

    def node_rank(self, node: str) -> int:
        """Place of a node.

        Raises:
            UsageError: The node has none.
        """
        try:
            return self.nodes.index(node)
        except ValueError:
            raise UsageError(f"node {node} is not in the layout ({', '.join(self.nodes)})", node=node) from None

    def node(self, rank: int) -> str:
        """Node of a global rank."""
        return self.nodes[rank // self.ranks_per_node]

    def rank(self, node: str, local_rank: int) -> int:
        """Global rank of a local rank of a node."""
        return self.node_rank(node) * self.ranks_per_node + local_rank


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


def load(run_dir: str) -> Layout | None:
    """Read the layout of the attempt before; None for the first one.

    Raises:
        DataError: The file is not a layout.
    """
    path = paths.layout(run_dir)
    try:
        raw = fsio.read_json(path)
    except FileNotFoundError:
        return None
    nodes = raw.get("nodes") if isinstance(raw, dict) and raw.get("version") == VERSION else None
    per_node = raw.get("ranks_per_node") if isinstance(raw, dict) else None
    if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes) or not isinstance(per_node, int):
        raise DataError(
            f"{path} is not a layout of version {VERSION}",
            mend="remove it: ranks then get new places and are restored from the parallel file system",
            path=path,
        )
    return Layout(nodes=tuple(nodes), ranks_per_node=per_node)


def save(run_dir: str, layout: Layout, attempt: int) -> None:
    """Publish the layout."""
    document = {
        "version": VERSION,
        "attempt": attempt,
        "nodes": list(layout.nodes),
        "ranks_per_node": layout.ranks_per_node,
    }
    fsio.write_json(paths.layout(run_dir), document)


def rendezvous_port(job_id: int, attempt: int, cycle: int) -> int:
    """Port of the ranks' rendezvous: another one for every launch, so that a socket in TIME_WAIT is never met.

    Jobs that share a node and start together differ too, as job ids are next to each other.
    """
    return PORT_FIRST + (job_id * 97 + attempt * 13 + cycle) % PORT_COUNT
