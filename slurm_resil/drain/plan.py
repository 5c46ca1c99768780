"""What goes where: from the manifests of all shards to datasets, pieces of work and checks. Pure.

Every mover makes the same plan from the same manifests. A *source* is one item of one shard (or its values); a *target*
is one dataset of the drained file; a *piece* is a part of a source that one mover writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_resil.comm.base import Runs
from slurm_resil.core.errors import DataError
from slurm_resil.drain import boxes
from slurm_resil.drain.balance import Holding, share
from slurm_resil.drain.boxes import Box
from slurm_resil.format.manifest import Item, ShardManifest

VALUES = "values"
VALUES_DTYPE = "json"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What the plan needs of a sealed shard.

    Attributes:
        mover: Rank of the mover whose node holds it.
        manifest: Its manifest, the values taken out.
        values: The values as an item: name, size and hash; ``offset`` is of no meaning.
    """

    mover: int
    manifest: ShardManifest
    values: Item

    @property
    def where(self) -> str:
        """Words for errors."""
        return f"rank {self.manifest.rank} on {self.manifest.node}"


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
        parts: Its boxes: (in the item, in the target). Plain ones are one box of bytes.
        shape: Shape that the boxes refer to, of the item.
        target_shape: The same of the target.
        itemsize: Size of an element of the boxes, bytes.
    """

    rank: int
    item: Item
    target: int
    parts: tuple[tuple[Box, Box], ...]
    shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    itemsize: int

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
    """All work of a drain.

    Attributes:
        head: Any shard's manifest: run, job, attempt, iteration, world size.
        targets: Datasets, in the order of the file.
        sources: Sources that are written or checked.
        pieces: Pieces of each mover, in the order of the file.
        checks: Sources that each mover reads back and compares with the seal's hash.
        holder: Mover that holds each rank's shard.
    """

    head: ShardManifest
    targets: tuple[Target, ...]
    sources: tuple[Source, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    checks: tuple[tuple[int, ...], ...]
    holder: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all targets."""
        return sum(target.nbytes for target in self.targets)

    def load(self, mover: int) -> int:
        """Bytes that a mover writes."""
        return sum(piece.nbytes for piece in self.pieces[mover])


def make(shards: Sequence[Shard], movers: int) -> Plan:
    """Plan a drain.

    Args:
        shards: One for each rank of the run, in any order.
        movers: Number of mover ranks.

    Raises:
        DataError: The shards do not make one checkpoint: says what and on which ranks.
    """
    shards = sorted(shards, key=lambda shard: shard.manifest.rank)
    _fit(shards)
    by_name: dict[str, list[tuple[Shard, Item]]] = {}
    for shard in shards:
        for item in shard.manifest.items:
            by_name.setdefault(item.name, []).append((shard, item))
    builder = _Builder()
    for name, having in by_name.items():
        _same_kind(name, having)
        sharing = having[0][1].sharing
        if sharing == "sharded":
            builder.sharded(name, having)
        elif sharing == "plain" and _all_equal(having):
            builder.once(having)
        else:
            for shard, item in having:
                builder.alone(shard, item)
    for shard in shards:
        builder.alone(shard, shard.values)
    return builder.finish(shards, movers)


def _fit(shards: Sequence[Shard]) -> None:
    if not shards:
        raise DataError("there is no shard to drain")
    head = shards[0].manifest
    for shard in shards:
        other = shard.manifest
        for field in ("run_id", "job_id", "attempt", "iteration", "world_size"):
            here, there = getattr(head, field), getattr(other, field)
            if here != there:
                text = f"{field} is {here} for {shards[0].where}, {there} for {shard.where}"
                raise DataError(f"shards of different checkpoints: {text}")
    ranks = [shard.manifest.rank for shard in shards]
    missing = sorted(set(range(head.world_size)) - set(ranks))
    if missing:
        raise DataError(f"iteration {head.iteration}: no shard of {words(missing)} (world size {head.world_size})")
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if len(set(ranks)) < len(ranks) else []
    if twice or max(ranks) >= head.world_size:
        odd = twice or [rank for rank in ranks if rank >= head.world_size]
        raise DataError(f"iteration {head.iteration}: {words(odd)} there twice or beyond world size {head.world_size}")


def words(ranks: Sequence[int]) -> str:
    """Ranks for people: ``ranks 0-3,7``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _same_kind(name: str, having: Sequence[tuple[Shard, Item]]) -> None:
    first_shard, first = having[0]
    names = set()
    for shard, item in having:
        if shard.manifest.rank in names:
            raise DataError(f"{name} is there twice in the shard of {shard.where}", item=name)
        names.add(shard.manifest.rank)
        for field in ("sharing", "dtype", "global_shape"):
            here, there = getattr(first, field), getattr(item, field)
            if here != there and not (field != "sharing" and first.sharing != "sharded"):
                raise DataError(
                    f"{name}: {field} is {here} for {first_shard.where} but {there} for {shard.where}", item=name
                )


def _all_equal(having: Sequence[tuple[Shard, Item]]) -> bool:
    first = having[0][1]
    return all(
        (i.dtype, i.shape, i.nbytes, i.xxh3) == (first.dtype, first.shape, first.nbytes, first.xxh3) for _, i in having
    )


class _Builder:
    def __init__(self) -> None:
        self.targets: list[Target] = []
        self.sources: list[Source] = []
        self.units: list[list[tuple[Shard, int, int]]] = []  # replicas of a part: (shard, source, part)
        self.to_check: list[int] = []
        self.own_check: set[int] = set()  # elements outside of all extents: only its own mover can check it

    def once(self, having: Sequence[tuple[Shard, Item]]) -> None:
        """One target of the same bytes on all ranks."""
        target = self._target(having[0][1], None)
        added = [(shard, self._flat(shard, item, target), 0) for shard, item in having if item.nbytes]
        if added:
            self.units.append(added)
            self.to_check.append(added[0][1])

    def alone(self, shard: Shard, item: Item) -> None:
        """One target of one rank."""
        target = self._target(item, shard.manifest.rank)
        if item.nbytes:
            source = self._flat(shard, item, target)
            self.units.append([(shard, source, 0)])
            self.to_check.append(source)

    def sharded(self, name: str, having: Sequence[tuple[Shard, Item]]) -> None:
        """One target whose parts lie on several ranks."""
        first = having[0][1]
        itemsize = max((i.nbytes // math.prod(i.shape) for _, i in having if i.nbytes), default=0)
        target = len(self.targets)
        nbytes = math.prod(first.global_shape) * itemsize
        self.targets.append(Target(name=name, dtype=first.dtype, shape=first.global_shape, nbytes=nbytes))
        seen: dict[Box, list[tuple[Shard, int, int]]] = {}
        distinct: dict[tuple[object, ...], tuple[str, Shard]] = {}
        for shard, item in having:
            parts = self._parts(name, shard, item, itemsize)
            if not parts:
                continue
            index = len(self.sources)
            key = (item.shape, parts)
            if key in distinct:
                xxh3, other = distinct[key]
                if xxh3 != item.xxh3:
                    raise DataError(
                        f"{name}: {other.where} and {shard.where} hold the same part with different contents",
                        mend="replicas of a sharded tensor must be equal: look for a node that computes wrong",
                        item=name,
                    )
            else:
                distinct[key] = (item.xxh3, shard)
                (self.to_check.append if boxes.covered(item.shape, [a for a, _ in parts]) else self.own_check.add)(
                    index
                )
            self.sources.append(
                Source(
                    rank=shard.manifest.rank,
                    item=item,
                    target=target,
                    parts=parts,
                    shape=item.shape,
                    target_shape=item.global_shape,
                    itemsize=itemsize,
                )
            )
            for part, (_, box) in enumerate(parts):
                seen.setdefault(box, []).append((shard, index, part))
        if nbytes:
            self._tiles(name, first.global_shape, seen)
        for replicas in seen.values():
            # shares of a part may come from several ranks only if the seal's hashes say that these are equal
            lead = self.sources[replicas[0][1]]
            equal = [
                r for r in replicas if (self.sources[r[1]].shape, self.sources[r[1]].parts) == (lead.shape, lead.parts)
            ]
            self.units.append(equal)

    def _tiles(self, name: str, shape: tuple[int, ...], seen: Mapping[Box, Sequence[tuple[Shard, int, int]]]) -> None:
        fault = boxes.flaw(shape, tuple(seen)) if seen else "all of it is missing"
        if fault:
            ranks = sorted({shard.manifest.rank for replicas in seen.values() for shard, _, _ in replicas})
            have = f" in the shards of {words(ranks)}" if ranks else ""
            raise DataError(f"{name} {list(shape)}: {fault}{have}", item=name)

    def _parts(self, name: str, shard: Shard, item: Item, itemsize: int) -> tuple[tuple[Box, Box], ...]:
        if item.nbytes != math.prod(item.shape) * itemsize:
            raise DataError(f"{name}: {item.nbytes} bytes for shape {list(item.shape)} on {shard.where}", item=name)
        parts = []
        for extent in item.extents:
            inside = Box(extent.local, extent.shape)
            if not len(extent.local) == len(extent.shape) == len(item.shape) == len(extent.start) or any(
                at < 0 or at + size > limit
                for at, size, limit in zip(extent.local, extent.shape, item.shape, strict=True)
            ):
                raise DataError(
                    f"{name}: an extent of {shard.where} is outside of its tensor {list(item.shape)}", item=name
                )
            if inside.volume:
                parts.append((inside, Box(extent.start, extent.shape)))
        return tuple(parts)

    def _target(self, item: Item, rank: int | None) -> int:
        self.targets.append(Target(name=item.name, dtype=item.dtype, shape=item.shape, nbytes=item.nbytes, rank=rank))
        return len(self.targets) - 1

    def _flat(self, shard: Shard, item: Item, target: int) -> int:
        whole = Box((0,), (item.nbytes,))
        self.sources.append(
            Source(
                rank=shard.manifest.rank,
                item=item,
                target=target,
                parts=((whole, whole),),
                shape=(item.nbytes,),
                target_shape=(item.nbytes,),
                itemsize=1,
            )
        )
        return len(self.sources) - 1

    def finish(self, shards: Sequence[Shard], movers: int) -> Plan:
        """Divide the work."""
        holdings = []
        for replicas in self.units:
            lowest: dict[int, tuple[int, int]] = {}
            for shard, source, part in replicas:
                lowest.setdefault(shard.mover, (source, part))
            _, source, part = replicas[0]
            holdings.append(Holding(nbytes=self.sources[source].part_bytes(part), movers=tuple(sorted(lowest))))
        pieces: list[list[Piece]] = [[] for _ in range(movers)]
        for unit, mover, first, last in share(holdings, movers):
            source, part = next((s, p) for shard, s, p in self.units[unit] if shard.mover == mover)
            pieces[mover].append(Piece(source=source, part=part, first=first, last=last))
        holder = {shard.manifest.rank: shard.mover for shard in shards}
        checks = self._checks(movers)
        for index in sorted(self.own_check):
            checks[holder[self.sources[index].rank]].append(index)
        return Plan(
            head=replace(shards[0].manifest, items=()),
            targets=tuple(self.targets),
            sources=tuple(self.sources),
            pieces=tuple(
                tuple(sorted(own, key=lambda p: (self.sources[p.source].target, p.source, p.part, p.first)))
                for own in pieces
            ),
            checks=tuple(tuple(own) for own in checks),
            holder=holder,
        )

    def _checks(self, movers: int) -> list[list[int]]:
        """Divide the reading back by place in the file; a mover reads what mostly another one wrote."""
        checks: list[list[int]] = [[] for _ in range(movers)]
        order = sorted(self.to_check, key=lambda index: self.sources[index].target)
        total = sum(self.sources[index].item.nbytes for index in order)
        done = 0
        for index in order:
            middle = done + self.sources[index].item.nbytes // 2
            checks[(middle * movers // max(total, 1) + 1) % movers].append(index)
            done += self.sources[index].item.nbytes
        return checks
