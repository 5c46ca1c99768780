"""Planning, divided: every mover plans the names that fall to it and sends each mover its part.

So no process ever looks at all items of all ranks: the work and the memory are those of the items, divided by the
number of movers. What is known to all are the shards' heads, the datasets and a few sums.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from typing import Any

import xxhash

from slurm_resil.comm.base import Communicator, agreed, allgather_json
from slurm_resil.core.errors import DataError
from slurm_resil.drain.balance import Survey
from slurm_resil.drain.plan import VALUES_DTYPE, Head, Part, Piece, Plan, Source, Target
from slurm_resil.drain.skeleton import dataset
from slurm_resil.format.manifest import Extent, Item
from slurm_resil.format.world import fit

Items = Mapping[int, Sequence[Item]]
"""Items of each rank, its values among them."""


def plan(comm: Communicator, heads: Sequence[Head], items: Items) -> Plan:
    """Plan a drain. Collective.

    Args:
        comm: Movers.
        heads: This mover's shards.
        items: Their items.

    Raises:
        DataError: The shards do not make one checkpoint; the same on every rank.
    """
    movers = comm.size
    gathered = [Head(**raw) for part in allgather_json(comm, [asdict(head) for head in heads]) for raw in part]
    fit(gathered)  # the same on every rank
    everybody = {head.rank: head for head in gathered}
    handed = _hand_out(comm, items)
    with agreed(comm, "planning"):
        part = Part(everybody, handed)
    surveys = [_survey(raw) for raw in allgather_json(comm, _pack_survey(part.survey(movers)))]
    pieces = part.pieces(surveys, comm.rank)
    rows = [[asdict(target) for target in part.targets], [sum(p.nbytes for p in own) for own in pieces]]
    shown = allgather_json(comm, rows)
    targets, places = _order([[_target(raw) for raw in entry[0]] for entry in shown])
    loads = tuple(sum(entry[1][mover] for entry in shown) for mover in range(movers))
    begins = list(accumulate((target.nbytes for target in targets), initial=0))
    checks = part.checks([begins[place] for place in places[comm.rank]], begins[-1], movers)
    sent = [_pack(part, pieces[mover], checks[mover]) for mover in range(movers)]
    _distinct(targets)  # the same on every rank
    return _plan(gathered, targets, loads, [json.loads(data) for data in comm.exchange(sent)], places)


class Alone:
    """The plans of all movers, made by one process that knows all items: the same for whoever makes them.

    Args:
        heads: All shards, with their movers.
        items: Their items.
        movers: Number of movers.

    Raises:
        DataError: The shards do not make one checkpoint.
    """

    def __init__(self, heads: Sequence[Head], items: Items, movers: int) -> None:
        self._heads = sorted(heads, key=lambda head: head.rank)
        fit(self._heads)
        everybody = {head.rank: head for head in self._heads}
        part = Part(everybody, [(rank, item) for rank in sorted(items) for item in items[rank]])
        self._targets, self._places = _order([part.targets])
        _distinct(self._targets)
        pieces = part.pieces([part.survey(movers)], 0)
        self._loads = tuple(sum(piece.nbytes for piece in own) for own in pieces)
        begins = list(accumulate((target.nbytes for target in self._targets), initial=0))
        checks = part.checks([begins[place] for place in self._places[0]], begins[-1], movers)
        self._part, self._pieces, self._checks = part, pieces, checks

    def of(self, mover: int) -> Plan:
        """Plan of a mover."""
        packed = json.loads(_pack(self._part, self._pieces[mover], self._checks[mover]))
        return _plan(self._heads, self._targets, self._loads, [packed], self._places)


def _plan(
    heads: Sequence[Head],
    targets: Sequence[Target],
    loads: tuple[int, ...],
    packed: Sequence[Any],
    places: Sequence[Sequence[int]],
) -> Plan:
    """Put together what all planners have for one mover."""
    sources: list[Source] = []
    mine: list[Piece] = []
    own_checks: list[int] = []
    for planner, raw in enumerate(packed):
        _unpack(raw, places[planner], sources, mine, own_checks)
    return Plan(
        head=replace(heads[0], metrics=_metrics(heads)),
        targets=tuple(targets),
        sources=tuple(sources),
        pieces=tuple(sorted(mine, key=lambda p: (sources[p.source].target, p.source, p.part, p.first))),
        checks=tuple(sorted(own_checks, key=lambda index: sources[index].target)),
        loads=loads,
    )


def _metrics(heads: Sequence[Head]) -> dict[str, float]:
    """Metrics of all ranks; of several that have one the lowest counts."""
    found: dict[str, float] = {}
    for head in sorted(heads, key=lambda head: -head.rank):
        found.update(head.metrics)
    return found


def planner_of(rank: int, item: Item, movers: int) -> int:
    """Which mover plans an item: the same for all ranks' items of one name."""
    if item.dtype == VALUES_DTYPE:
        return rank % movers
    return int(xxhash.xxh3_64_intdigest(item.name.encode())) % movers


def _hand_out(comm: Communicator, items: Items) -> list[tuple[int, Item]]:
    rows: list[list[Any]] = [[] for _ in range(comm.size)]
    for rank, own in items.items():
        for item in own:
            rows[planner_of(rank, item, comm.size)].append([rank, row(item)])
    received = comm.exchange([json.dumps(part).encode() for part in rows])
    return [(rank, item_of(raw)) for data in received for rank, raw in json.loads(data)]


def row(item: Item) -> list[Any]:
    """What planning needs of an item, as plain values; :func:`item_of` is the way back."""
    extents = [[e.local, e.start, e.shape] for e in item.extents]
    return [
        item.name,
        item.dtype,
        item.shape,
        item.offset,
        item.nbytes,
        item.sharing,
        item.global_shape,
        extents,
        item.xxh3,
        item.block_bytes,  # and not the hashes of the blocks: nothing of a drain needs them from another mover
    ]


def item_of(values: Sequence[Any]) -> Item:
    """Item of a :func:`row`."""
    name, dtype, shape, offset, nbytes, sharing, global_shape, extents, xxh3, block_bytes = values
    return Item(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        offset=offset,
        nbytes=nbytes,
        sharing=sharing,
        global_shape=tuple(global_shape),
        extents=tuple(Extent(local=tuple(a), start=tuple(b), shape=tuple(c)) for a, b, c in extents),
        xxh3=xxh3,
        block_bytes=block_bytes,
    )


def _target(raw: Mapping[str, Any]) -> Target:
    return Target(**{**raw, "shape": tuple(raw["shape"])})


def _pack_survey(survey: Survey) -> list[Any]:
    return [survey.alone, [[group, size] for group, size in survey.shared.items()]]


def _survey(raw: Sequence[Any]) -> Survey:
    return Survey(alone=tuple(raw[0]), shared={tuple(group): size for group, size in raw[1]})


def _order(parts: Sequence[Sequence[Target]]) -> tuple[list[Target], list[list[int]]]:
    """All targets in the order of the file: global ones by name, then each rank's; and the places of each part's."""
    keyed = [
        ((-1 if target.rank is None else target.rank, target.name, target.dtype), part, index)
        for part, targets in enumerate(parts)
        for index, target in enumerate(targets)
    ]
    keyed.sort()
    places = [[0] * len(targets) for targets in parts]
    for place, (_, part, index) in enumerate(keyed):
        places[part][index] = place
    return [parts[part][index] for _, part, index in keyed], places


def _distinct(targets: Sequence[Target]) -> None:
    names = [dataset(target.name, target.rank) for target in targets]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DataError(f"two datasets would have the name {twice[0]}", mend="rename that part of the state")


def _pack(part: Part, pieces: Sequence[Piece], checks: Sequence[int]) -> bytes:
    used = sorted({piece.source for piece in pieces} | set(checks))
    number = {index: place for place, index in enumerate(used)}
    sources = [[part.sources[index].rank, part.sources[index].target, row(part.sources[index].item)] for index in used]
    rows = [[number[p.source], p.part, p.first, p.last] for p in pieces]
    return json.dumps([sources, rows, [number[index] for index in checks]]).encode()


def _unpack(
    raw: Sequence[Any], places: Sequence[int], sources: list[Source], pieces: list[Piece], checks: list[int]
) -> None:
    first = len(sources)
    sources += [Source(rank=rank, target=places[target], item=item_of(values)) for rank, target, values in raw[0]]
    pieces += [Piece(source=first + source, part=part, first=a, last=b) for source, part, a, b in raw[1]]
    checks += [first + index for index in raw[2]]
