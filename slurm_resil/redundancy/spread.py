"""Divide nodes over sets so that each set holds as few as possible of those that fail together. Pure.

With S sets a failure group of g nodes has g/S of them in a set on average, so that no division does better than
floor(g/S) or ceil(g/S) in every set: that is *even*. For groups that are nested (rack in row) it comes from dealing
the nodes out in the order of their groups. For two families of nested groups that cross (rack in row, and power
domain) it can always be had as well: take any two sets, pair up their nodes within each smallest group, the one left
over with those left over in the next larger group, and so for either family. The pairs of two families together are
paths and cycles of even length, so that the nodes can be parted again with one of each pair on either side, and then
all groups of both families are even over the two sets. A step takes as long as two sets are large, never makes a group
less even, and makes at least one more even, so there is an end, and there all are even (de Werra, "Equitable
colorations of graphs", 1971, for groups without nesting).

For a third family that crosses both there may be no such division: it gets what the freedom left by the other two
allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

Groups = Sequence[int]  # group of each node; levels are given as these
_TRIES = 16  # other sets that are tried for one too full in a level of lower rank
_VISITS = 8  # how often each node may be looked at for the sake of these levels, on average


def refines(fine: Groups, coarse: Groups) -> bool:
    """Whether each group of one level lies within one group of another."""
    above: dict[int, int] = {}
    return all(above.setdefault(one, other) == other for one, other in zip(fine, coarse, strict=True))


def families(levels: Iterable[Groups]) -> tuple[list[list[Groups]], list[Groups]]:
    """Put levels that are nested together.

    Args:
        levels: Levels, those first that matter most.

    Returns:
        Two families at most, each from the finest to the coarsest level, and the levels that fit in neither.
    """
    found: list[list[Groups]] = []
    rest = []
    for level in levels:
        for family in found:
            if all(refines(level, other) or refines(other, level) for other in family):
                family.append(level)
                break
        else:
            if len(found) < 2:
                found.append([level])
            else:
                rest.append(level)
    for family in found:
        family.sort(key=lambda level: -len(set(level)))
    return found, rest


class Division:
    """Nodes divided over sets.

    Args:
        count: Number of sets.
        levels: Groups of each node, by level; those first that matter most.
        sets: Set of each node to begin with, sizes at most one apart; None: deal them out.

    Attributes:
        sets: Set of each node.
        steps: Pairs of sets that were parted anew.
    """

    def __init__(self, count: int, nodes: int, levels: Sequence[Groups], sets: Sequence[int] | None = None) -> None:
        self._count = count
        self._families, self._rest = families(levels)
        self._levels = [*(level for family in self._families for level in family), *self._rest]
        self.sets = list(sets) if sets is not None else self._dealt(nodes)
        self.steps = 0
        self._visits = _VISITS * (nodes + 512)
        self._members: list[list[int]] = [[] for _ in range(count)]
        for node, place in enumerate(self.sets):
            self._members[place].append(node)
        # how many of a group are in each set that has any, by level and group
        self._held: list[dict[int, Counter[int]]] = [{} for _ in self._levels]
        for held, level in zip(self._held, self._levels, strict=True):
            for node, group in enumerate(level):
                held.setdefault(group, Counter())[self.sets[node]] += 1

    def _dealt(self, nodes: int) -> list[int]:
        keys = [level for family in self._families for level in reversed(family)] + self._rest
        order = sorted(range(nodes), key=lambda node: (*(level[node] for level in keys), node))
        sets = [0] * nodes
        for place, node in enumerate(order):
            sets[node] = place % self._count
        return sets

    def even_out(self) -> None:
        """Make all groups as even as they can be."""
        certain = sum(len(family) for family in self._families)
        for held in self._held[:certain]:
            for group in list(held):
                while (pair := self._uneven(held[group])) is not None:
                    self._part(*pair)
        for held in self._held[certain:]:
            for group in list(held):
                self._ease(held, group)

    def _uneven(self, counts: Counter[int]) -> tuple[int, int] | None:
        """A set with too many of a group, and one with at least two fewer of it."""
        size = sum(counts.values())
        most, least = -(-size // self._count), size // self._count
        full = max(counts, key=lambda place: (counts[place], -place))
        if counts[full] > most:
            return full, self._emptier(counts, full, counts[full] - 2)
        if least:
            empty = min(range(self._count), key=lambda place: (counts[place], place))
            if counts[empty] < least:
                return full, empty
        return None

    def _emptier(self, counts: Counter[int], full: int, limit: int) -> int:
        places = ((full + step) % self._count for step in range(1, self._count))
        return next(place for place in places if counts[place] <= limit)

    def _part(self, one: int, other: int) -> None:
        """Part the nodes of two sets anew."""
        self.steps += 1
        before = {node: self.sets[node] for node in (*self._members[one], *self._members[other])}
        self._move(halved(sorted(before), self._families, self._rest, before, (one, other)), (one, other))

    def _move(self, sets: dict[int, int], pair: tuple[int, int]) -> None:
        for node, place in sets.items():
            if self.sets[node] != place:
                for held, level in zip(self._held, self._levels, strict=True):
                    counts = held[level[node]]
                    counts[self.sets[node]] -= 1
                    if not counts[self.sets[node]]:
                        del counts[self.sets[node]]
                    counts[place] += 1
                self.sets[node] = place
        for place in pair:
            self._members[place] = [node for node in sets if sets[node] == place]

    def _ease(self, held: dict[int, Counter[int]], group: int) -> None:
        """Make a group of lower rank more even, as far as a few tries go."""
        tries = 0
        while tries < _TRIES and self._visits > 0 and (pair := self._uneven(held[group])) is not None:
            full, start = pair
            other = (start + tries) % self._count
            if other != full and held[group][other] + 2 <= held[group][full]:
                before = {node: self.sets[node] for node in (*self._members[full], *self._members[other])}
                self._visits -= len(before)
                cost = self._crowd(pair=(full, other))
                self._part(full, other)
                if self._crowd(pair=(full, other)) < cost:
                    tries = 0
                    continue
                self._move(before, (full, other))
            tries += 1

    def _crowd(self, pair: tuple[int, int]) -> int:
        """How uneven two sets are in the levels of lower rank."""
        counts = Counter(
            (place, at, level[node])
            for place in pair
            for node in self._members[place]
            for at, level in enumerate(self._rest)
        )
        return sum(count * count for count in counts.values())


def _mates(nodes: Sequence[int], family: Sequence[Groups], *, all_: bool) -> dict[int, int]:
    """Pair up nodes within the smallest groups they can be paired in, with anybody in the end if ``all_``."""
    mates: dict[int, int] = {}
    left = list(nodes)
    for level in (*family, None) if all_ else family:
        alone: dict[int, int] = {}
        for node in left:
            group = 0 if level is None else level[node]
            mate = alone.pop(group, None)
            if mate is None:
                alone[group] = node
            else:
                mates[node], mates[mate] = mate, node
        left = sorted(alone.values())
    return mates


def halved(
    nodes: Sequence[int],
    families_: Sequence[Sequence[Groups]],
    rest: Sequence[Groups],
    now: dict[int, int],
    pair: tuple[int, int],
) -> dict[int, int]:
    """Part nodes over two sets so that every group of both families is even.

    Args:
        nodes: Nodes of both sets, in order.
        families_: Two families at most, each from the finest to the coarsest level.
        rest: Levels that are made even as far as possible.
        now: Set of each node at present: as many as possible stay.
        pair: The sets.

    Returns:
        Set of each node; sizes are at most one apart.
    """
    first = _mates(nodes, families_[0] if families_ else (), all_=True)
    second = _mates(nodes, families_[1], all_=False) if len(families_) > 1 else {}
    placed: dict[int, int] = {}
    crowd: Counter[tuple[int, int, int]] = Counter()
    # paths begin at an end; what is met later is a cycle
    for start in sorted(nodes, key=lambda node: (node in first and node in second, node)):
        if start in placed:
            continue
        part = _component(start, first, second)
        moved = sum(now[node] != pair[side] for node, side in part.items())
        costs = [moved, len(part) - moved]
        crowds = [_crowding(part, pair, turned, rest, crowd) for turned in (0, 1)] if rest else [0, 0]
        turned = 0 if (crowds[0], costs[0]) <= (crowds[1], costs[1]) else 1
        wanted = {node: pair[side ^ turned] for node, side in part.items()}
        placed |= wanted
        for at, level in enumerate(rest):
            crowd.update((place, at, level[node]) for node, place in wanted.items())
    return placed


def _crowding(
    part: dict[int, int],
    pair: tuple[int, int],
    turned: int,
    rest: Sequence[Groups],
    crowd: Counter[tuple[int, int, int]],
) -> int:
    """How much more uneven the levels of lower rank become with a part on these sides."""
    sides = part.items()
    added = Counter((pair[side ^ turned], at, level[node]) for node, side in sides for at, level in enumerate(rest))
    return sum((2 * crowd[key] + count) * count for key, count in added.items())


def _component(start: int, first: dict[int, int], second: dict[int, int]) -> dict[int, int]:
    """Nodes that hang together by pairs of either family, with a side each: mates are on different ones."""
    sides = {start: 0}
    todo = [start]
    while todo:
        node = todo.pop()
        for mates in (first, second):
            mate = mates.get(node)
            if mate is not None and mate not in sides:
                sides[mate] = 1 - sides[node]
                todo.append(mate)
    return sides
