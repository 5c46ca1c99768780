"""Which node holds which node_rank, and which ranks.

File ``layout.json`` in the run's directory::

    {"version": 1, "attempt": 2, "nodes": ["n1", "n5", "n3"], "ranks_per_node": 4}

The index in ``nodes`` is the node_rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError, UsageError

VERSION = 1


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
