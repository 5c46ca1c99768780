from __future__ import annotations

import math

import pytest

from slurm_resil.watch import cadence

VECTORS = [  # minutes: d, M, Young, Daly, exact
    (5, 1440, 120.000, 116.690, 116.690),
    (1, 108, 14.697, 14.038, 14.038),
    (10, 60, 34.641, 28.295, 28.321),
]


@pytest.mark.parametrize(("d", "m", "young", "daly", "exact"), VECTORS)
def test_published_vectors(d: float, m: float, young: float, daly: float, exact: float) -> None:
    assert cadence.young(d, m) == pytest.approx(young, abs=5e-4)
    assert cadence.daly(d, m) == pytest.approx(daly, abs=5e-4)
    assert cadence.optimum(d, m) == pytest.approx(exact, abs=5e-4)


def test_expected_wall_time() -> None:
    hours = [cadence.wall_time(500 * 60, t, 5, 10, 1440) / 60 for t in (60, 116.69, 240)]
    assert hours == pytest.approx([557.939, 547.882, 560.286], abs=5e-3)


@pytest.mark.parametrize(("d", "m"), [(5, 1440), (10, 60), (1, 1.2), (0.001, 1e6)])
def test_the_optimum_is_one(d: float, m: float) -> None:
    best = cadence.optimum(d, m)
    at = cadence.wall_time(1000, best, d, 3, m)
    assert at <= cadence.wall_time(1000, best * 1.01, d, 3, m)
    assert at <= cadence.wall_time(1000, best * 0.99, d, 3, m)


def test_checkpoints_that_cost_more_than_failures() -> None:
    assert cadence.daly(200, 100) == 100
    assert cadence.daly(1000, 100) == 100


def test_several_levels() -> None:
    hour = 60.0
    (often, seldom), overhead = cadence.several_levels([(1 / (2 * hour), 2 / 60), (1 / (24 * hour), 5)])
    assert often == pytest.approx(2.828, abs=5e-4)
    assert seldom == pytest.approx(120.0)
    assert overhead == pytest.approx(0.1069, abs=5e-5)
    assert cadence.several_levels([(1 / (2 * hour) + 1 / (24 * hour), 5)])[1] == pytest.approx(0.3005, abs=5e-5)


def test_whole_iterations() -> None:
    assert cadence.iterations(600, 0.5) == 1200
    assert cadence.iterations(0.1, 5) == 1


@pytest.mark.parametrize("call", [cadence.young, cadence.daly, cadence.optimum])
@pytest.mark.parametrize(("d", "m"), [(0, 1), (1, 0), (-1, 1), (math.nan, 1), (1, math.inf)])
def test_nonsense_is_refused(call, d: float, m: float) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="above 0"):
        call(d, m)
