"""Divisions of nodes over sets: as even as any can be, for all small shapes and many larger ones."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from slurm_resil.redundancy.spread import Division, families, refines

Groups = Sequence[int]


def partitions(nodes: int) -> Iterator[tuple[int, ...]]:
    """Every way to put so many nodes into groups, as restricted growth strings."""

    def grow(prefix: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(prefix) == nodes:
            yield prefix
            return
        for group in range(max(prefix, default=-1) + 2):
            yield from grow((*prefix, group))

    return grow(())


def spans(sets: Sequence[int], count: int, level: Groups) -> dict[int, tuple[int, int]]:
    """Least and most members of each group in a set."""
    counts = Counter(zip(level, sets, strict=True))
    every = {group: [counts[group, place] for place in range(count)] for group in set(level)}
    return {group: (min(found), max(found)) for group, found in every.items()}


def assert_even(division: Division, count: int, levels: Sequence[Groups]) -> None:
    for level in ([0] * len(division.sets), *levels):
        assert all(most - least <= 1 for least, most in spans(division.sets, count, level).values())


def test_all_small_shapes_of_two_crossing_levels_are_even() -> None:
    # no division has fewer than g/S members of a group, rounded up, in its worst set, nor more than that, rounded
    # down, in its best: one that is even in every group is the best there is by each measure
    for nodes in range(1, 6):
        shapes = list(partitions(nodes))
        for first, second in itertools.product(shapes, repeat=2):
            for count in range(1, nodes + 1):
                division = Division(count, nodes, [first, second])
                division.even_out()
                assert_even(division, count, [first, second])


@pytest.mark.parametrize("seed", range(300))
def test_two_families_of_nested_levels_are_even_from_any_start(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randint(1, 60)
    count = rng.randint(1, nodes)
    rack = [rng.randrange(rng.randint(1, 20)) for _ in range(nodes)]
    power = [rng.randrange(rng.randint(1, 12)) for _ in range(nodes)]
    levels = [rack, power, [one // 3 for one in rack], [one // 2 for one in power], [one // 9 for one in rack]]
    start = [place % count for place in range(nodes)]
    rng.shuffle(start)
    kin, rest = families(levels)
    placed = [level for family in kin for level in family]
    assert len(placed) + len(rest) == len(levels)
    for begin in (None, start):
        division = Division(count, nodes, levels, begin)
        division.even_out()
        assert_even(division, count, placed)
        again = Division(count, nodes, levels, begin)
        again.even_out()
        assert again.sets == division.sets


def best_of_all(nodes: int, count: int, levels: Sequence[Groups]) -> int:
    """Fewest pairs of nodes of one group in one set, over all divisions that are even in the first two levels."""
    sizes = sorted(place % count for place in range(nodes))
    found = []
    for sets in set(itertools.permutations(sizes)):
        if all(most - least <= 1 for level in levels[:2] for least, most in spans(sets, count, level).values()):
            found.append(pairs(sets, levels[2]))
    return min(found)


def pairs(sets: Sequence[int], level: Groups) -> int:
    return sum(n * (n - 1) // 2 for n in Counter(zip(level, sets, strict=True)).values())


def test_a_third_level_that_crosses_both_gets_what_is_left() -> None:
    rng = random.Random(3)
    worse, tried = 0, 0
    for _ in range(60):
        nodes, count = 7, rng.choice((2, 3))
        levels = [[rng.randrange(3) for _ in range(nodes)] for _ in range(3)]
        if len(families(levels)[1]) != 1:
            continue
        division = Division(count, nodes, levels)
        division.even_out()
        assert_even(division, count, levels[:2])
        extra = pairs(division.sets, levels[2]) - best_of_all(nodes, count, levels)
        tried, worse = tried + 1, worse + (extra > 0)
        assert 0 <= extra <= 2
    assert tried > 20
    assert worse <= tried // 4


def test_families() -> None:
    rack, row, power, third = [0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1], [0, 1, 1, 2, 2, 0]
    assert refines(rack, row) and not refines(row, rack)
    assert families([row, power, rack, third]) == ([[rack, row], [power]], [third])


def test_nested_levels_need_no_step_and_two_crossing_ones_few() -> None:
    nodes, count = 16384, 2048
    rack = [node // 18 for node in range(nodes)]
    row = [node // 180 for node in range(nodes)]
    power = [node * 7919 % 300 for node in range(nodes)]
    dealt = Division(count, nodes, [rack, row])
    dealt.even_out()
    assert dealt.steps == 0
    start = [place % count for place in range(nodes)]
    random.Random(1).shuffle(start)
    crossing = Division(count, nodes, [rack, row, power], start)
    crossing.even_out()
    assert_even(crossing, count, [rack, row, power])
    assert crossing.steps < nodes // 8  # of a set's size squared at most, each
