"""Division of the work."""

from __future__ import annotations

import random

import pytest

from slurm_resil.drain.balance import Holding, fill, share, survey


def divide(holdings: list[Holding], movers: int, planners: int = 1) -> list[int]:
    """Loads, after checking that every byte has one mover that holds it."""
    loads = [0] * movers
    portions = [holdings[planner::planners] for planner in range(planners)]
    surveys = [survey(portion, movers) for portion in portions]
    for planner, portion in enumerate(portions):
        loads = [a + b for a, b in zip(loads, divide_one(portion, surveys, planner), strict=True)]
    return loads


def divide_one(holdings: list[Holding], surveys, planner: int) -> list[int]:
    loads = [0] * len(surveys[0].alone)
    covered: dict[int, list[tuple[int, int]]] = {}
    for index, mover, first, last in share(holdings, surveys, planner):
        assert mover in holdings[index].movers and 0 <= first < last <= holdings[index].nbytes
        covered.setdefault(index, []).append((first, last))
        loads[mover] += last - first
    for index, holding in enumerate(holdings):
        at = 0
        for first, last in sorted(covered.get(index, [])):
            assert first == at
            at = last
        assert at == holding.nbytes
    return loads


@pytest.mark.parametrize("planners", [1, 2, 7])
@pytest.mark.parametrize("seed", range(30))
def test_every_byte_once_and_balanced(seed, planners):
    rng = random.Random(seed)
    movers = rng.choice((1, 2, 3, 4, 7, 16))
    everyone = tuple(range(movers))
    holdings = [Holding(nbytes=rng.choice((0, 4, 100, 5000, 70000)), movers=everyone) for _ in range(60)]
    holdings += [Holding(nbytes=20000, movers=(mover,)) for mover in everyone]
    loads = divide(holdings, movers, planners)
    assert max(loads) <= 1.1 * sum(loads) / movers + 512 * planners


@pytest.mark.parametrize("movers", [2, 4, 8, 64])
def test_one_large_item_is_cut(movers):
    loads = divide([Holding(nbytes=10 << 30, movers=tuple(range(movers)))], movers)
    assert max(loads) <= 1.01 * (10 << 30) / movers + (4 << 20)


def test_replicas_in_pairs():
    holdings = [Holding(nbytes=1 << 20, movers=(mover % 4, mover % 4 + 4)) for mover in range(8)]
    loads = divide(holdings, 8)
    assert max(loads) <= 1.1 * sum(loads) / 8


def test_few_cuts():
    movers = 16
    holdings = [Holding(nbytes=100_000, movers=tuple(range(movers))) for _ in range(1000)]
    assert len(share(holdings, [survey(holdings, movers)], 0)) <= 1000 + movers


@pytest.mark.parametrize("planners", [1, 2])
def test_what_one_planner_shares_evens_out_what_another_has_fixed(planners):
    holdings = [Holding(nbytes=90_000, movers=(2,)), Holding(nbytes=400_000, movers=(0, 1, 2, 3))]
    loads = divide(holdings, 4, planners)
    assert max(loads) <= 1.05 * sum(loads) / 4


def test_who_has_more_of_its_own_gets_less_of_the_shared():
    holdings = [Holding(nbytes=9000, movers=(0,)), Holding(nbytes=30000, movers=(0, 1, 2))]
    loads = divide(holdings, 3)
    assert max(loads) - min(loads) <= 1024


@pytest.mark.parametrize(
    ("loads", "amount", "added"),
    [
        ([0, 0], 4, [2, 2]),
        ([0, 0], 5, [3, 2]),
        ([10, 0], 4, [0, 4]),
        ([10, 0], 14, [2, 12]),
        ([3, 1, 2], 0, [0, 0, 0]),
        ([5], 7, [7]),
        ([4, 8, 0], 6, [1, 0, 5]),
    ],
)
def test_fill(loads, amount, added):
    assert fill(loads, amount) == added


@pytest.mark.parametrize("seed", range(20))
def test_fill_is_level(seed):
    rng = random.Random(seed)
    loads = [rng.randrange(1000) for _ in range(rng.randrange(1, 9))]
    amount = rng.randrange(5000)
    added = fill(loads, amount)
    assert sum(added) == amount and min(added) >= 0
    levels = [load + more for load, more in zip(loads, added, strict=True)]
    touched = [level for level, more in zip(levels, added, strict=True) if more]
    assert not touched or max(touched) - min(levels) <= 1
