"""What becomes of rank-private state when the number of ranks has changed.

Plain values that are the same on all ranks, and items that the drain stored once, belong to everybody. The rest is
private: running statistics of each replica, random generators, the place in the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from slurm_resil.ckpt import plain
from slurm_resil.ckpt.plain import Path
from slurm_resil.core.errors import StateError

Policy = Literal["error", "fresh", "rank_mod"]
KEEP = {"$": "keep"}  # in the place of a value: leave what is there
_UNITS = ("stateful", "torch.Generator", "numpy.random.Generator", "numpy.random.RandomState", "random.Random")
_SHOWN = 5


def merge(values: Sequence[Any], is_global: Callable[[str], bool], *, policy: Policy, rank: int) -> Any:
    """Make the values that a rank of a new world restores from those of all ranks of the old world.

    Args:
        values: Of every old rank, in order.
        is_global: Whether an item is stored once for all ranks.
        policy: ``error``; ``fresh``: private values stay as they are in the state; ``rank_mod``: rank r takes those of
            rank r modulo the old number of ranks.
        rank: New rank.

    Raises:
        StateError: The policy is ``error`` and something is private; names the first few.
    """
    merger = _Merger(is_global, policy, rank % len(values))
    merged = merger.node(list(values), ())
    if merger.found and policy == "error":
        names = ", ".join(plain.where(path) for path in merger.found[:_SHOWN])
        more = f" and {len(merger.found) - _SHOWN} more" if len(merger.found) > _SHOWN else ""
        raise StateError(
            f"the number of ranks has changed from {len(values)}, and this state is each rank's own: {names}{more}",
            mend='restore with private="fresh" to leave it as it is, or private="rank_mod" to hand it on',
        )
    return merged


class _Merger:
    def __init__(self, is_global: Callable[[str], bool], policy: Policy, mine: int) -> None:
        self._is_global, self._policy, self._mine = is_global, policy, mine
        self.found: list[Path] = []

    def node(self, nodes: list[Any], path: Path) -> Any:
        """Merge the values of one place."""
        first = nodes[0]
        texts = {json.dumps(node, sort_keys=True) for node in nodes} if len(nodes) > 1 else {""}
        if len(texts) == 1 and self._shared(first):
            return first
        kind = first.get("$") if isinstance(first, dict) else "list" if isinstance(first, list) else None
        alike = all(_shape(node) == _shape(first) for node in nodes)
        if kind is None or kind in _UNITS or not alike:
            return self._private(nodes, path)
        if isinstance(first, list):
            return [self.node(list(column), (*path, str(i))) for i, column in enumerate(zip(*nodes, strict=True))]
        if kind == "optimizer":
            return self._optimizer(nodes, path)
        if isinstance(first.get("of"), list) and kind in (*plain.DICT_KINDS, "module", "dataclass", "namespace"):
            columns = zip(*(node["of"] for node in nodes), strict=True)
            of = [self._pair(list(column), path) for column in columns]
            return {**first, "of": of}
        if kind == "tuple":
            return {**first, "of": self.node([node["of"] for node in nodes], path)}
        return self._private(nodes, path)

    def _pair(self, pairs: list[Any], path: Path) -> list[Any]:
        key = pairs[0][0]
        return [key, self.node([pair[1] for pair in pairs], (*path, key if isinstance(key, str) else json.dumps(key)))]

    def _optimizer(self, nodes: list[Any], path: Path) -> Any:
        merged = dict(nodes[0])
        merged["groups"] = [
            {
                **column[0],
                "of": [self._pair(list(pairs), path) for pairs in zip(*(c["of"] for c in column), strict=True)],
            }
            for column in zip(*(node["groups"] for node in nodes), strict=True)
        ]
        merged["state"] = [
            [
                column[0][0],
                [self._pair(list(pairs), (*path, column[0][0])) for pairs in zip(*(c[1] for c in column), strict=True)],
            ]
            for column in zip(*(node["state"] for node in nodes), strict=True)
        ]
        merged["other"] = [
            self._pair(list(pairs), path) for pairs in zip(*(node["other"] for node in nodes), strict=True)
        ]
        return merged

    def _shared(self, node: Any) -> bool:
        """Whether every item below a node is stored once."""
        if isinstance(node, dict):
            return ("item" not in node or self._is_global(node["item"])) and all(map(self._shared, node.values()))
        return all(map(self._shared, node)) if isinstance(node, list) else True

    def _private(self, nodes: list[Any], path: Path) -> Any:
        self.found.append(path)
        return KEEP if self._policy == "fresh" else nodes[self._mine]


def _shape(node: Any) -> Any:
    """What must be the same on all ranks for a merge of the parts: kind, keys, lengths."""
    if isinstance(node, list):
        return ("list", len(node))
    if not isinstance(node, dict):
        return None
    if node["$"] == "optimizer":
        groups = [(group["params"], [pair[0] for pair in group["of"]]) for group in node["groups"]]
        state = [(name, [pair[0] for pair in pairs]) for name, pairs in node["state"]]
        return ("optimizer", groups, state, [pair[0] for pair in node["other"]])
    of = node.get("of")
    if isinstance(of, list) and node["$"] in (*plain.DICT_KINDS, "module", "dataclass", "namespace"):
        return (node["$"], [pair[0] for pair in of])
    return (node["$"], len(of) if isinstance(of, list) else None)
