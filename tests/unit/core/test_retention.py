"""Which checkpoints stay: every rule, all of them together, and that the order of deleting changes nothing."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from slurm_resil.core.errors import UsageError
from slurm_resil.core.retention import ALL, Best, Checkpoint, Retention, judge, parse_best, parse_last


def made(*iterations: int, step_s: float = 600.0, **metrics: list[float | None]) -> list[Checkpoint]:
    """Checkpoints, each ``step_s`` after the one before."""
    found = []
    for number, iteration in enumerate(iterations):
        own = {name: values[number] for name, values in metrics.items() if values[number] is not None}
        found.append(Checkpoint(iteration=iteration, created_s=7200.0 + number * step_s, metrics=own))
    return found


def kept(checkpoints: list[Checkpoint], retention: Retention, **more: int) -> list[int]:
    return sorted(iteration for iteration, why in judge(checkpoints, retention, **more).items() if why)


TEN = made(*range(10, 110, 10))


def test_without_rules_everything_stays():
    for retention in (Retention(), Retention(keep_last=ALL), Retention(keep_last=ALL, every_iterations=7)):
        assert not retention.deletes
        assert kept(TEN, retention) == list(range(10, 110, 10))
        assert str(retention) == "everything"


@pytest.mark.parametrize(
    ("retention", "left"),
    [
        (Retention(keep_last=1), [100]),
        (Retention(keep_last=3), [80, 90, 100]),
        (Retention(keep_last=99), list(range(10, 110, 10))),
        (Retention(every_iterations=40), [40, 80, 100]),
        (Retention(keep_last=2, every_iterations=50), [50, 90, 100]),
        (Retention(every_s=3600.0), [10, 70, 100]),
        (Retention(every_s=1.0), list(range(10, 110, 10))),
        (Retention(keep_last=2, every_s=1800.0), [10, 40, 70, 90, 100]),
    ],
)
def test_each_rule(retention, left):
    assert kept(TEN, retention) == left
    assert retention.deletes


def test_the_best_stay_and_of_equal_ones_the_newer():
    four = made(1, 2, 3, 4, loss=[0.5, 0.2, 0.2, 0.9], acc=[0.1, None, 0.7, None])
    assert kept(four, Retention(best=Best(metric="loss"))) == [3, 4]
    assert kept(four, Retention(best=Best(metric="loss", count=2))) == [2, 3, 4]
    assert kept(four, Retention(best=Best(metric="acc", largest=True))) == [3, 4]
    assert kept(four, Retention(best=Best(metric="acc"))) == [1, 4]


def test_a_value_that_is_no_number_is_never_the_best():
    four = made(1, 2, 3, 4, loss=[math.nan, 0.4, math.inf, -math.inf])
    assert kept(four, Retention(best=Best(metric="loss"))) == [2, 4]


def test_while_no_checkpoint_has_the_metric_nothing_goes():
    four = made(1, 2, 3, 4, loss=[1.0, 2.0, 3.0, 4.0])
    assert kept(four, Retention(keep_last=1, best=Best(metric="los"))) == [1, 2, 3, 4]
    assert "no checkpoint has the metric los" in judge(four, Retention(best=Best(metric="los")))[1]


def test_what_is_newer_than_the_training_counts_for_nothing_and_stays():
    assert kept(TEN, Retention(keep_last=1), newest=60) == [60, 70, 80, 90, 100]
    assert kept(TEN, Retention(keep_last=2), newest=65) == [50, 60, 70, 80, 90, 100]
    best = made(1, 2, 3, loss=[0.5, 0.4, 0.1])
    assert kept(best, Retention(best=Best(metric="loss")), newest=2) == [2, 3]
    assert kept(TEN, Retention(keep_last=1), newest=5) == list(range(10, 110, 10))


def test_what_a_person_keeps_stays():
    own = [Checkpoint(iteration=1, by_hand=True), Checkpoint(iteration=2), Checkpoint(iteration=3)]
    assert judge(own, Retention(keep_last=1)) == {3: ("newest",), 2: (), 1: ("by hand",)}


def test_a_clock_that_makes_no_sense_harms_nobody():
    odd = [Checkpoint(iteration=i, created_s=s) for i, s in enumerate((math.nan, math.inf, -5.0, 0.0, 1e300), start=1)]
    assert kept(odd, Retention(every_s=3600.0)) == [3, 4, 5]
    assert kept(odd, Retention(keep_last=2)) == [4, 5]


RULES = [
    Retention(keep_last=last, every_iterations=every, every_s=seconds, best=best)
    for last, every, seconds, best in itertools.product(
        (None, 1, 3), (None, 4), (None, 25.0), (None, Best(metric="m"), Best(metric="m", largest=True, count=2))
    )
]


@pytest.mark.parametrize("retention", [rule for rule in RULES if rule.deletes], ids=str)
def test_deleting_after_each_one_leaves_what_deleting_at_the_end_leaves(retention):
    numbers = random.Random(str(retention))
    for _ in range(60):
        times = itertools.accumulate(numbers.choice((0.0, 3.0, 11.0, 60.0)) for _ in range(12))
        come = [
            Checkpoint(
                iteration=iteration,
                created_s=created,
                metrics=numbers.choice([{}, {"m": numbers.choice((0.0, 1.0, 2.0))}, {"m": math.nan}]),
            )
            for iteration, created in zip(sorted(numbers.sample(range(1, 60), 12)), times, strict=True)
        ]
        there: list[Checkpoint] = []
        for one in come:
            there.append(one)
            why = judge(there, retention)
            assert why[one.iteration], "the newest always stays"
            left = [other for other in there if why[other.iteration]]
            assert judge(left, retention) == {other.iteration: why[other.iteration] for other in left}  # once is enough
            there = left
        assert [one.iteration for one in there] == kept(come, retention)


def test_every_set_of_four_is_judged_by_its_members_alone():
    """Exhaustive: adding a newer one takes no reason but being the last or the best from those before it."""
    retention = Retention(keep_last=1, every_iterations=2, every_s=3.0)
    for size in range(1, 5):
        for chosen in itertools.combinations(range(1, 9), size):
            why = judge([Checkpoint(iteration=i, created_s=float(i)) for i in chosen], retention)
            for iteration in chosen:
                first = iteration == min(i for i in chosen if i // 3 == iteration // 3)
                assert bool(why[iteration]) == (iteration == max(chosen) or iteration % 2 == 0 or first)


def test_words():
    full = Retention(keep_last=3, every_iterations=1000, every_s=3600.0, best=parse_best("loss:min:2"))
    assert str(full) == "the last 3, every 1000 iterations, the first of every 3600 s, the best by loss:min:2"
    assert str(Retention(every_iterations=5)) == "the last one, every 5 iterations"


def test_values_as_people_write_them():
    assert (parse_last("3"), parse_last("all")) == (3, ALL)
    assert parse_best("eval/loss:min") == Best(metric="eval/loss")
    assert parse_best("acc:max:3") == Best(metric="acc", largest=True, count=3)
    for text in ("0", "-1", "", "ALL", "1.5", "٣", "9" * 30):
        with pytest.raises(UsageError, match="as in 3"):
            parse_last(text)
    for text in (
        "",
        "loss",
        "loss:",
        "loss:low",
        ":min",
        "a b:min",
        "loss:min:",
        "loss:min:0",
        "loss:min:x",
        "a:min:1:2",
    ):
        with pytest.raises(UsageError, match="as in loss:min"):
            parse_best(text)
