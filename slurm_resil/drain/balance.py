"""Divides the writing among movers so that all write about the same. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

_MAX_GRAIN_BYTES = 4 << 20
_MIN_GRAIN_BYTES = 512
_GRAINS_PER_MOVER = 32


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A run of bytes to be written once.

    Attributes:
        nbytes: Its size.
        movers: Movers that hold the same bytes, ascending, at least one.
    """

    nbytes: int
    movers: tuple[int, ...]


def share(holdings: Sequence[Holding], movers: int) -> list[tuple[int, int, int, int]]:
    """Divide the work.

    What one mover alone holds, it writes. What several hold is cut so that all of them end up with the same number of
    bytes, as far as their own holdings allow; each mover gets runs of neighbours, so there are few cuts.

    Args:
        holdings: What is to be written.
        movers: Number of movers.

    Returns:
        (index of the holding, mover, first byte, last byte), none empty.
    """
    loads = [0] * movers
    parts: list[tuple[int, int, int, int]] = []
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, holding in enumerate(holdings):
        if holding.nbytes == 0:
            continue
        if len(holding.movers) == 1:
            loads[holding.movers[0]] += holding.nbytes
            parts.append((index, holding.movers[0], 0, holding.nbytes))
        else:
            groups.setdefault(holding.movers, []).append(index)
    total = sum(holding.nbytes for holding in holdings)
    grain = max(_MIN_GRAIN_BYTES, min(_MAX_GRAIN_BYTES, total // (movers * _GRAINS_PER_MOVER) // 512 * 512))
    for group in sorted(groups, key=lambda group: (len(group), group)):
        for part in _cut(holdings, groups[group], group, loads, grain):
            loads[part[1]] += part[3] - part[2]
            parts.append(part)
    return parts


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
    holdings: Sequence[Holding], group: Sequence[int], movers: Sequence[int], loads: Sequence[int], grain: int
) -> Iterator[tuple[int, int, int, int]]:
    ends = list(accumulate(holdings[index].nbytes for index in group))
    added = fill([loads[mover] for mover in movers], ends[-1])
    cuts = [0]
    for mark in accumulate(added):
        cuts.append(max(cuts[-1], _snap(mark, ends, grain)))
    for mover, begin, end in zip(movers, cuts, cuts[1:], strict=False):
        at = bisect_right(ends, begin)
        while begin < end:
            start = ends[at - 1] if at else 0
            stop = min(end, ends[at])
            yield group[at], mover, begin - start, stop - start
            begin, at = stop, at + 1


def _snap(mark: int, ends: Sequence[int], grain: int) -> int:
    """Move a cut to a multiple of the grain inside its holding, or to the holding's end."""
    at = bisect_right(ends, mark)
    if at == len(ends):
        return ends[-1]
    start = ends[at - 1] if at else 0
    return min(start + round((mark - start) / grain) * grain, ends[at])
