"""What goes where: types of a plan, and the plan of a part of all items. Pure.

A *source* is one item of one shard (or its values); a *target* is one dataset of the drained file; a *piece* is a part
of a source that one mover writes. Planning is divided: each planner looks at some names only, but at the items of all
ranks with these names, see :mod:`slurm_resil.drain.planning`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurm_resil.comm.base import Runs
from slurm_resil.core.errors import DataError
from slurm_resil.drain import boxes
from slurm_resil.drain.balance import Holding, Survey, share, survey
from slurm_resil.format.boxes import Box, Shape, covered, flaw, inside
from slurm_resil.format.manifest import Item
from slurm_resil.format.world import words

VALUES = "values"
VALUES_DTYPE = "json"


@dataclass(frozen=True, kw_only=True)
class Head:
    """A shard without its items.

    Attributes:
        mover: Mover whose node holds it.
        node: Name of that node.
        metrics: What the training said of the state.
    """

    mover: int
    node: str
    run_id: str
    job_id: int
    attempt: int
    iteration: int
    rank: int
    world_size: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Words for errors."""
        return f"rank {self.rank} on {self.node}"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A dataset of the drained file; attributes as of DrainedItem, without the offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """One item of one shard and where it lies in its target.

    Attributes:
        rank: Rank of the shard.
        item: The item; for values :data:`VALUES` with the dtype :data:`VALUES_DTYPE`.
        target: Index of the target.
        itemsize: Size of an element of the boxes, bytes.
        shape: Shape that the boxes refer to, of the item.
        target_shape: The same of the target.
        parts: Its boxes: (in the item, in the target), none empty. Whatever is not sharded is one box of bytes.
    """

    rank: int
    item: Item
    target: int
    itemsize: int = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    target_shape: tuple[int, ...] = field(init=False)
    parts: tuple[tuple[Box, Box], ...] = field(init=False)

    def __post_init__(self) -> None:
        item = self.item
        if item.sharing == "sharded":
            pairs = ((Box(e.local, e.shape), Box(e.start, e.shape)) for e in item.extents)
            parts = tuple(pair for pair in pairs if pair[0].volume)
            size = item.nbytes // max(1, math.prod(item.shape))
            self._set(size, item.shape, item.global_shape, parts)
        else:
            whole = Box((0,), (item.nbytes,))
            self._set(1, (item.nbytes,), (item.nbytes,), ((whole, whole),) if item.nbytes else ())

    def _set(self, itemsize: int, shape: Shape, target: Shape, parts: tuple[tuple[Box, Box], ...]) -> None:
        for name, value in (("itemsize", itemsize), ("shape", shape), ("target_shape", target), ("parts", parts)):
            object.__setattr__(self, name, value)

    def runs(self, part: int, first: int, last: int) -> Runs:
        """Byte runs of a slice of a part, from item to target."""
        source, target = self.parts[part]
        return boxes.runs(
            self.target_shape,
            source,
            target,
            source_shape=self.shape,
            itemsize=self.itemsize,
            first=first,
            last=last,
        )

    def run_bytes(self, part: int) -> int:
        """Size of the contiguous ranges that a part is made of."""
        return boxes.block(self.parts[part][0].shape, self.target_shape, self.shape, self.itemsize)[1]

    def part_bytes(self, part: int) -> int:
        """Size of a part."""
        return self.parts[part][0].volume * self.itemsize

    def before(self, part: int, offset: int) -> int:
        """Bytes of a part's stream that lie before a byte of the target."""
        return boxes.before(self.target_shape, self.parts[part][1], self.itemsize, min(max(offset, 0), self._limit))

    @property
    def _limit(self) -> int:
        return math.prod(self.target_shape) * self.itemsize

    @property
    def span(self) -> tuple[int, int]:
        """First byte of all parts in the target, and the byte after the last one."""
        ends = [boxes.span(self.target_shape, box, self.itemsize) for _, box in self.parts]
        return min(begin for begin, _ in ends), max(end for _, end in ends)

    @property
    def whole(self) -> bool:
        """Whether the parts cover the item, so that its bytes can be told from the target's."""
        return covered(self.shape, [inside for inside, _ in self.parts])


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A slice of a part of a source, written by the mover that holds the source.

    Attributes:
        source: Index of the source.
        part: Index of the part.
        first: Start in the part's stream of bytes.
        last: End.
    """

    source: int
    part: int
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Size."""
        return self.last - self.first


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one mover needs to know of a drain.

    Attributes:
        head: Any shard: run, job, attempt, iteration, world size; and the metrics of all.
        targets: All datasets, in the order of the file.
        sources: Sources that this mover writes or checks.
        pieces: What it writes, in the order of the file.
        checks: Sources that it reads back and compares with the seal's hash, in the order of the file.
        loads: Bytes that each mover writes.
    """

    head: Head
    targets: tuple[Target, ...]
    sources: tuple[Source, ...]
    pieces: tuple[Piece, ...]
    checks: tuple[int, ...]
    loads: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all targets."""
        return sum(self.loads)


class Part:
    """The plan of some names: datasets, divided writing, divided checks. Indices are this part's own.

    Args:
        heads: All shards, by rank.
        items: The items with these names, of all ranks, as (rank, item).

    Raises:
        DataError: Items do not fit together: says what and on which ranks.
    """

    def __init__(self, heads: Mapping[int, Head], items: Sequence[tuple[int, Item]]) -> None:
        self._heads = heads
        self.targets: list[Target] = []
        self.sources: list[Source] = []
        self._units: list[list[tuple[int, int]]] = []  # replicas of a part, as (source, part)
        self._to_check: list[tuple[int, int]] = []  # (byte of the target at which it is reached, source)
        self._own_check: list[int] = []  # elements outside of all extents: only its own mover can check it
        by_name: dict[str, list[tuple[int, Item]]] = {}
        for rank, item in sorted(items, key=lambda entry: entry[0]):
            if item.dtype == VALUES_DTYPE:
                self._alone(rank, item)
            else:
                by_name.setdefault(item.name, []).append((rank, item))
        for name, having in by_name.items():
            self._same_kind(name, having)
            if having[0][1].sharing == "sharded":
                self._sharded(name, having)
            elif having[0][1].sharing == "plain" and len({_likeness(item) for _, item in having}) == 1:
                self._once(having)
            else:
                for rank, item in having:
                    self._alone(rank, item)
        self._holdings = [self._holding(replicas) for replicas in self._units]

    def survey(self, movers: int) -> Survey:
        """What the other planners need to know to balance the writing."""
        return survey(self._holdings, movers)

    def pieces(self, surveys: Sequence[Survey], planner: int) -> list[list[Piece]]:
        """Divide the writing; pieces by mover."""
        pieces: list[list[Piece]] = [[] for _ in surveys[0].alone]
        for unit, mover, first, last in share(self._holdings, surveys, planner):
            source, part = next(replica for replica in self._units[unit] if self._mover(replica[0]) == mover)
            pieces[mover].append(Piece(source=source, part=part, first=first, last=last))
        return pieces

    def checks(self, begins: Sequence[int], total: int, movers: int) -> list[list[int]]:
        """Divide the reading back: each mover checks what lies in one part of the file.

        Sources of one target that are interleaved in the file go to one mover together: so their bytes are read once.
        Mover 0 has the second part, and so on: with many movers, a mover reads what another one wrote.

        Args:
            begins: Bytes of all targets before each of this part's, in the order of the file.
            total: Bytes of all targets.
            movers: Number of movers.
        """
        checks: list[list[int]] = [[] for _ in range(movers)]
        for at, index in self._to_check:
            place = begins[self.sources[index].target] + at
            checks[(place * movers // max(total, 1) - 1) % movers].append(index)
        for index in self._own_check:
            checks[self._mover(index)].append(index)
        return checks

    def _mover(self, source: int) -> int:
        return self._heads[self.sources[source].rank].mover

    def _holding(self, replicas: Sequence[tuple[int, int]]) -> Holding:
        source, part = replicas[0]
        movers = sorted({self._mover(index) for index, _ in replicas})
        return Holding(nbytes=self.sources[source].part_bytes(part), movers=tuple(movers))

    def _same_kind(self, name: str, having: Sequence[tuple[int, Item]]) -> None:
        first_rank, first = having[0]
        names = ("sharing", "dtype", "global_shape") if first.sharing == "sharded" else ("sharing",)
        ranks = set()
        for rank, item in having:
            if rank in ranks:
                raise DataError(f"{name} is there twice in the shard of {self._heads[rank].where}", item=name)
            ranks.add(rank)
            for kind in names:
                here, there = getattr(first, kind), getattr(item, kind)
                if here != there:
                    a, b = self._heads[first_rank].where, self._heads[rank].where
                    raise DataError(f"{name}: {kind} is {here} for {a} but {there} for {b}", item=name)

    def _target(self, item: Item, rank: int | None) -> int:
        self.targets.append(Target(name=item.name, dtype=item.dtype, shape=item.shape, nbytes=item.nbytes, rank=rank))
        return len(self.targets) - 1

    def _source(self, rank: int, item: Item, target: int) -> int:
        self.sources.append(Source(rank=rank, item=item, target=target))
        return len(self.sources) - 1

    def _once(self, having: Sequence[tuple[int, Item]]) -> None:
        """One target of the same bytes on all ranks."""
        target = self._target(having[0][1], None)
        if having[0][1].nbytes:
            added = [(self._source(rank, item, target), 0) for rank, item in having]
            self._units.append(added)
            self._to_check.append((0, added[0][0]))

    def _alone(self, rank: int, item: Item) -> None:
        """One target of one rank."""
        target = self._target(item, rank)
        if item.nbytes:
            source = self._source(rank, item, target)
            self._units.append([(source, 0)])
            self._to_check.append((0, source))

    def _sharded(self, name: str, having: Sequence[tuple[int, Item]]) -> None:
        """One target whose parts lie on several ranks."""
        first = having[0][1]
        itemsize = max((i.nbytes // math.prod(i.shape) for _, i in having if i.nbytes), default=0)
        target = len(self.targets)
        nbytes = math.prod(first.global_shape) * itemsize
        self.targets.append(Target(name=name, dtype=first.dtype, shape=first.global_shape, nbytes=nbytes))
        replicas: dict[Box, list[tuple[int, int]]] = {}
        distinct: dict[tuple[object, ...], int] = {}
        to_check: list[int] = []
        for rank, item in having:
            self._check_item(name, rank, item, itemsize)
            if not any(math.prod(extent.shape) for extent in item.extents):
                continue
            index = self._source(rank, item, target)
            source = self.sources[index]
            like = distinct.setdefault((item.shape, source.parts), index)
            if like == index:
                (to_check if source.whole else self._own_check).append(index)
            elif self.sources[like].item.xxh3 != item.xxh3:
                a, b = self._heads[self.sources[like].rank].where, self._heads[rank].where
                if self.sources[like].item.block_bytes != item.block_bytes:
                    text, mend = "seals of different versions", "seal all shards with one version of slurm-resil"
                else:
                    text = "different contents"
                    mend = "replicas of a sharded tensor must be equal: look for a node that computes wrong"
                raise DataError(
                    f"{name}: {a} and {b} hold the same part with {text}",
                    mend=mend,
                    item=name,
                )
            for part, (_, box) in enumerate(source.parts):
                replicas.setdefault(box, []).append((index, part))
        spans = [self.sources[index].span for index in to_check]
        apart = all(end - begin == self.sources[i].item.nbytes for i, (begin, end) in zip(to_check, spans, strict=True))
        self._to_check += [(span[0] if apart else 0, index) for span, index in zip(spans, to_check, strict=True)]
        if nbytes:
            self._tiles(name, first.global_shape, replicas)
        for alike in replicas.values():
            # shares of a part may come from several ranks only if the seal's hashes say that these are equal
            lead = self.sources[alike[0][0]]
            same = (lead.shape, lead.parts)
            self._units.append([r for r in alike if (self.sources[r[0]].shape, self.sources[r[0]].parts) == same])

    def _tiles(self, name: str, shape: tuple[int, ...], replicas: Mapping[Box, Sequence[tuple[int, int]]]) -> None:
        fault = flaw(shape, tuple(replicas)) if replicas else "all of it is missing"
        if fault:
            ranks = sorted({self.sources[index].rank for alike in replicas.values() for index, _ in alike})
            have = f" in the shards of {words(ranks)}" if ranks else ""
            raise DataError(f"{name} {list(shape)}: {fault}{have}", item=name)

    def _check_item(self, name: str, rank: int, item: Item, itemsize: int) -> None:
        where = self._heads[rank].where
        if item.nbytes != math.prod(item.shape) * itemsize:
            raise DataError(f"{name}: {item.nbytes} bytes for shape {list(item.shape)} on {where}", item=name)
        for extent in item.extents:
            if len(extent.start) != len(item.shape) or not inside(Box(extent.local, extent.shape), item.shape):
                text = f"an extent of {where} is outside of its tensor {list(item.shape)}"
                raise DataError(f"{name}: {text}", item=name)


def _likeness(item: Item) -> tuple[object, ...]:
    return item.dtype, item.shape, item.nbytes, item.xxh3
