"""Divides the writing among movers so that all write about the same. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_MAX_GRAIN_BYTES = 4 << 20
_MIN_GRAIN_BYTES = 512
_GRAINS_PER_MOVER = 32

Group = tuple[int, ...]
"""Movers that hold the same bytes, ascending."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A run of bytes to be written once.

    Attributes:
        nbytes: Its size.
        movers: Movers that hold the same bytes, ascending, at least one.
    """

    nbytes: int
    movers: Group


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Sums over some holdings.

    Attributes:
        alone: Bytes that each mover alone holds.
        shared: Bytes that several hold, by group.
    """

    alone: tuple[int, ...]
    shared: dict[Group, int]


def survey(holdings: Sequence[Holding], movers: int) -> Survey:
    """Sum up holdings."""
    alone = [0] * movers
    shared: dict[Group, int] = {}
    for holding in holdings:
        if len(holding.movers) == 1:
            alone[holding.movers[0]] += holding.nbytes
        elif holding.nbytes:
            shared[holding.movers] = shared.get(holding.movers, 0) + holding.nbytes
    return Survey(alone=tuple(alone), shared=shared)


def share(holdings: Sequence[Holding], surveys: Sequence[Survey], planner: int) -> list[tuple[int, int, int, int]]:
    """Divide the work of one planner, so that the sum over all planners is balanced.

    What one mover alone holds, it writes. What several hold is cut so that all of them end up with the same number of
    bytes, as far as their own holdings allow; each mover gets runs of neighbours, so there are few cuts.

    Args:
        holdings: What this planner divides.
        surveys: Surveys of all planners.
        planner: Own number.

    Returns:
        (index of the holding, mover, first byte, last byte), none empty.
    """
    groups: dict[Group, list[int]] = {}
    parts: list[tuple[int, int, int, int]] = []
    for index, holding in enumerate(holdings):
        if holding.nbytes and len(holding.movers) == 1:
            parts.append((index, holding.movers[0], 0, holding.nbytes))
        elif holding.nbytes:
            groups.setdefault(holding.movers, []).append(index)
    for group, (begin, marks, grain) in _cuts(surveys, planner).items():
        if group in groups:
            parts += _cut(holdings, groups[group], group, [mark - begin for mark in marks], grain)
    return parts


def _cuts(surveys: Sequence[Survey], planner: int) -> dict[Group, tuple[int, list[int], int]]:
    """By group: where this planner's bytes begin among all planners', where each mover's share ends, the grain."""
    movers = len(surveys[0].alone)
    loads = [sum(one.alone[mover] for one in surveys) for mover in range(movers)]
    total = sum(loads) + sum(sum(one.shared.values()) for one in surveys)
    grain = max(_MIN_GRAIN_BYTES, min(_MAX_GRAIN_BYTES, total // (movers * _GRAINS_PER_MOVER) // 512 * 512))
    cuts = {}
    for group in sorted({group for one in surveys for group in one.shared}, key=lambda group: (len(group), group)):
        sizes = [one.shared.get(group, 0) for one in surveys]
        added = fill([loads[mover] for mover in group], sum(sizes))
        for mover, more in zip(group, added, strict=True):
            loads[mover] += more
        cuts[group] = (sum(sizes[:planner]), list(accumulate(added)), grain)
    return cuts


def fill(loads: Sequence[int], amount: int) -> list[int]:
    """Pour ``amount`` over vessels filled to ``loads`` so that the lowest rise first; returns the additions."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    below = 0
    for count in range(1, len(order) + 1):
        below += loads[order[count - 1]]
        level, extra = divmod(below + amount, count)
        if count == len(order) or level <= loads[order[count]]:
            break
    added = [0] * len(loads)
    for place, i in enumerate(order[:count]):
        added[i] = level - loads[i] + (place < extra)
    return added


def _cut(
    holdings: Sequence[Holding], members: Sequence[int], group: Group, marks: Sequence[int], grain: int
) -> Iterator[tuple[int, int, int, int]]:
    ends = list(accumulate(holdings[index].nbytes for index in members))
    cuts = [0]
    for mark in marks:
        cuts.append(max(cuts[-1], _snap(mark, ends, grain)))
    for mover, (begin, end) in zip(group, pairwise(cuts), strict=True):
        at = bisect_right(ends, begin)
        while begin < end:
            start = ends[at - 1] if at else 0
            stop = min(end, ends[at])
            yield members[at], mover, begin - start, stop - start
            begin, at = stop, at + 1


def _snap(mark: int, ends: Sequence[int], grain: int) -> int:
    """Move a cut to a multiple of the grain inside its holding, or to the holding's end."""
    if mark <= 0:
        return 0
    at = bisect_right(ends, mark)
    if at == len(ends):
        return ends[-1]
    start = ends[at - 1] if at else 0
    return min(start + round((mark - start) / grain) * grain, ends[at])
