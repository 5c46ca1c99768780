"""Which nodes protect each other: sets of about a size, each over as many failure groups as can be had. Pure.

The costs that a size is chosen by, for sets of n nodes under a scheme that covers k losses:

- memory: each node holds k / (n - k) of a node's state as parity (``partner``: k whole copies);
- risk: any k + 1 of the n nodes lost at once are too many, and larger sets have more of such;
- network: each node sends about its state once, whatever n is.

So a set of 8 has parity of a seventh, and gains little from more members. Without a wish, sets are made smaller than
that, down to 4, where it takes that for the loss of a whole failure group (a rack, a switch) to be covered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurm_resil.core.failure_groups import Level
from slurm_resil.core.schemes import Scheme
from slurm_resil.core.sets import parity_bytes
from slurm_resil.redundancy.spread import Division

USUAL_SIZE = 8
SMALL_SIZE = 4  # no smaller sets without a wish: their parity is a third of the state
_NAMED = 4  # so many groups are named in a warning
_NEWCOMERS = 512  # with more new nodes than this, sets are made anew


@dataclass(frozen=True, kw_only=True)
class Crowded:
    """Sets that have more members in one group than their scheme covers the loss of.

    Attributes:
        level: What the groups are.
        group: The group.
        sets: How many sets there are that the loss of this group is too much for.
        most: Members that the worst of them has in it.
    """

    level: str
    group: str
    sets: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Sets:
    """Sets of nodes.

    Attributes:
        members: Names of the nodes of each set.
        scheme: What covers them: the strongest scheme of the job.
        crowded: Where the loss of one failure group is too much.
        warnings: Sentences for whoever started the job.
        notes: Sentences for whoever wants to know more.
    """

    members: tuple[tuple[str, ...], ...]
    scheme: Scheme
    crowded: tuple[Crowded, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def smallest(self) -> int:
        """Members of the smallest set: its nodes hold most parity."""
        return min(map(len, self.members), default=0)

    @property
    def protected(self) -> bool:
        """Whether any node has another one that could protect it."""
        return self.smallest > 1 and self.scheme.losses > 0


def count_of_sets(nodes: int, size: int, least: int) -> int:
    """Number of sets whose size is next to a wanted one, and in which no set is smaller than ``least`` if possible."""
    few = max(1, nodes // size)
    nearest = min((few + 1, few), key=lambda count: abs(nodes / count - size))
    return max(1, min(nearest, nodes // least))


def make(
    nodes: Sequence[str],
    levels: Sequence[Level] = (),
    *,
    scheme: Scheme,
    size: int | None = None,
    before: Iterable[Sequence[str]] = (),
) -> Sets:
    """Make sets. The same arguments give the same sets.

    Args:
        nodes: Names, by node_rank.
        levels: Failure groups, the level that matters most first. Of a node that is not in one nothing is known there.
        scheme: The strongest scheme of the job.
        size: Wanted size of a set; None: what the costs say.
        before: Sets of the attempt before: nodes stay in theirs where that is no worse than new sets would be.
    """
    if len(nodes) < 2 or not scheme.losses:
        why = "one node has nobody that could protect it" if scheme.losses else "the scheme is single"
        return Sets(members=tuple((node,) for node in nodes), scheme=scheme, notes=(why,))
    groups = [_numbered(nodes, level) for level in levels]
    least = scheme.least_members
    count = count_of_sets(len(nodes), size, least) if size else _usual_count(groups, len(nodes), scheme)
    kept = _kept(nodes, before, count, groups)
    telling = [group for group in groups if 1 < len(set(group)) < len(nodes)]
    division = Division(count, len(nodes), telling)
    division.even_out()
    if kept is not None:
        division = _nearest(kept, division, count, len(nodes), telling, scheme.losses)
    members: list[list[str]] = [[] for _ in range(count)]
    for node, place in zip(nodes, division.sets, strict=True):
        members[place].append(node)
    rank = {node: place for place, node in enumerate(nodes)}
    members.sort(key=lambda one: rank[one[0]])
    made = Sets(members=tuple(map(tuple, members)), scheme=scheme)
    return _told(made, levels, nodes, size)


def _numbered(nodes: Sequence[str], level: Level) -> list[int]:
    """Groups of the nodes as numbers; one of which nothing is known has a group of its own."""
    numbers: dict[str, int] = {}
    alone = len(nodes)
    found = []
    for node in nodes:
        name = level.groups.get(node)
        if name is None:
            alone += 1
            found.append(alone)
        else:
            found.append(numbers.setdefault(name, len(numbers)))
    return found


def _usual_count(groups: Sequence[Sequence[int]], nodes: int, scheme: Scheme) -> int:
    """Number of sets without a wish: the fewest that cover the loss of a group, level by level, within limits."""
    least = scheme.least_members
    count = count_of_sets(nodes, max(USUAL_SIZE, least), least)
    most = max(count, nodes // max(SMALL_SIZE, least))
    for group in groups:
        sizes = Counter(group)
        need = -(-max(sizes.values()) // scheme.losses)
        if len(sizes) > 1 and need <= most:
            count = max(count, need)
    return count


def _kept(
    nodes: Sequence[str], before: Iterable[Sequence[str]], count: int, groups: Sequence[Sequence[int]]
) -> list[int] | None:
    """Set of each node as it was, newcomers in the gaps; None where that gives no sets of the right sizes."""
    here = {node: place for place, node in enumerate(nodes)}
    old = [[here[node] for node in one if node in here] for one in before]
    known = {place for one in old for place in one}
    newcomers = [place for place in range(len(nodes)) if place not in known]
    least, most = len(nodes) // count, -(-len(nodes) // count)
    if len(old) != count or sum(map(len, old)) != len(known) or len(newcomers) > _NEWCOMERS:
        return None
    for newcomer in newcomers:
        gaps = [one for one in old if len(one) < least] or [one for one in old if len(one) < most]

        def fit(one: list[int], node: int = newcomer) -> tuple[int, ...]:
            return (*(sum(group[other] == group[node] for other in one) for group in groups), len(one))

        min(gaps, key=fit, default=old[0]).append(newcomer)
    if not all(least <= len(one) <= most for one in old):
        return None
    places = {node: number for number, one in enumerate(old) for node in one}
    return [places[node] for node in range(len(nodes))]


def _nearest(
    kept: list[int], fresh: Division, count: int, nodes: int, levels: Sequence[Sequence[int]], losses: int
) -> Division:
    """The sets as they were if they are as good as new ones, else with as few changes as that takes."""
    same = Division(count, nodes, levels, kept)
    if _badness(same.sets, levels, losses) > _badness(fresh.sets, levels, losses):
        same.even_out()
    return same


def _badness(sets: Sequence[int], levels: Sequence[Sequence[int]], losses: int) -> list[int]:
    """By level, how many members there are beyond what may be lost, and beyond one, of one group in one set."""
    found = []
    for level in levels:
        counts = Counter(zip(level, sets, strict=True)).values()
        found += [sum(max(0, count - losses) for count in counts), sum(count - 1 for count in counts)]
    return found


def _told(made: Sets, levels: Sequence[Level], nodes: Sequence[str], size: int | None) -> Sets:
    crowded: list[Crowded] = []
    warnings: list[str] = []
    notes: list[str] = []
    scheme, least = made.scheme, made.scheme.least_members
    if made.smallest < least:
        warnings.append(
            f"{scheme} is to cover {_times(scheme.losses, 'loss', 'losses')} in a set, which takes {least} nodes, and "
            f"there are {len(nodes)}: {_times(len(nodes) - 1, 'loss is', 'losses are')} covered"
        )
    place = {node: number for number, one in enumerate(made.members) for node in one}
    for level in levels:
        unknown = [node for node in nodes if node not in level.groups]
        if unknown:
            notes.append(
                f"the {level.name} of {_some(unknown)} is not known: taken as one that fails alone",
            )
        found = _crowded(level, place, scheme.losses)
        if not found:
            continue
        if len({level.groups.get(node, node) for node in nodes}) == 1:
            notes.append(f"all nodes are in one {level.name} ({found[0].group}): nothing here covers its loss")
            continue
        crowded += found
        words = _words(found, level, made, nodes, size)
        (notes if level.minor else warnings).append(words)
    return Sets(
        members=made.members, scheme=scheme, crowded=tuple(crowded), warnings=tuple(warnings), notes=tuple(notes)
    )


def _crowded(level: Level, place: dict[str, int], losses: int) -> list[Crowded]:
    counts = Counter((level.groups[node], number) for node, number in place.items() if node in level.groups)
    worst: dict[str, list[int]] = {}
    for (group, _), count in counts.items():
        if count > losses:
            worst.setdefault(group, []).append(count)
    return [
        Crowded(level=level.name, group=group, sets=len(found), most=max(found))
        for group, found in sorted(worst.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    ]


def _words(found: Sequence[Crowded], level: Level, made: Sets, nodes: Sequence[str], size: int | None) -> str:
    scheme, name = made.scheme, level.name
    groups = Counter(level.groups[node] for node in nodes if node in level.groups)
    named = [f"{one.group} (up to {one.most} nodes in {_times(one.sets, 'set', 'sets')})" for one in found[:_NAMED]]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    words = (
        f"{scheme} covers the loss of {_times(scheme.losses, 'node', 'nodes')} of a set, and "
        f"{_times(len(made.members), 'set', 'sets')} over {_times(len(groups), name, f'{name} groups')} cannot have "
        f"fewer in one: nothing covers the loss of {name} {', '.join(named)}{more}"
    )
    largest = max(groups.values())
    smaller = len(nodes) // -(-largest // scheme.losses)
    if smaller >= scheme.least_members and (size is None or smaller < size):
        percent = parity_bytes(scheme, smaller, 1000) / 10
        return f"{words}; set_size {smaller} would, with parity of {percent:.0f} % of a node's state"
    return f"{words}; nodes of more {name} groups would, or a scheme that covers more losses"


def _times(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _some(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:_NAMED]) + (f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else "")
