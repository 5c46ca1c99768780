"""Items that need no protection, because enough nodes of some set hold the same bytes of their own.

Each node tells a hash of every item to the mover that this hash falls to, which counts holders and answers. So no mover
hears of more than its share, however many ranks there are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from slurm_resil.comm.base import Communicator
from slurm_resil.format.manifest import Item, ShardManifest, digest

LEAST_BYTES = 1024  # smaller ones cost more to name than to protect
_KEY_BYTES = 16


def held_by_enough(
    comm: Communicator, manifests: Sequence[ShardManifest], sets: Sequence[Sequence[int]], losses: Sequence[int]
) -> dict[int, list[Item]]:
    """Items of this node, by rank, that are left out of its package. Collective.

    An item is left out if one set has more holders of it, on different nodes, than it may lose: at least one of them
    survives then. Private items are never left out.

    Args:
        comm: Movers.
        manifests: Shards of this node.
        sets: All sets, as ranks of movers.
        losses: Nodes that each of them may lose.
    """
    set_of = {rank: number for number, one in enumerate(sets) for rank in one}
    keys = {bytes.fromhex(_key(item)): None for manifest in manifests for item in manifest.items if _may(item)}
    asked: list[list[bytes]] = [[] for _ in range(comm.size)]
    for key in keys:
        asked[int.from_bytes(key[:8], "little") % comm.size].append(key)
    heard = [_split(part) for part in comm.exchange([b"".join(part) for part in asked])]
    holders: dict[bytes, dict[int, int]] = {}
    for rank, part in enumerate(heard):
        for key in part:
            counts = holders.setdefault(key, {})
            counts[set_of[rank]] = counts.get(set_of[rank], 0) + 1
    enough = {key for key, counts in holders.items() if any(n > losses[number] for number, n in counts.items())}
    answers = comm.exchange([bytes(key in enough for key in part) for part in heard])
    out = {
        key for part, answer in zip(asked, answers, strict=True) for key, yes in zip(part, answer, strict=True) if yes
    }
    return {
        manifest.rank: [item for item in manifest.items if _may(item) and bytes.fromhex(_key(item)) in out]
        for manifest in manifests
    }


def _may(item: Item) -> bool:
    return item.sharing in ("plain", "sharded") and item.offset is not None and item.nbytes >= LEAST_BYTES


def _key(item: Item) -> str:
    boxes = [[list(e.local), list(e.start), list(e.shape)] for e in item.extents]
    return digest(json.dumps([item.name, item.dtype, item.nbytes, item.xxh3, item.sharing, boxes]).encode())


def _split(data: bytes) -> list[bytes]:
    return [data[at : at + _KEY_BYTES] for at in range(0, len(data), _KEY_BYTES)]
