from __future__ import annotations

from slurm_resil.agent.wishes import Wishes
from slurm_resil.core.model import Notice, NoticeKind


def stop(kind: NoticeKind = NoticeKind.WALLTIME, deadline_s: float | None = None) -> Notice:
    return Notice(kind=kind, stop=True, deadline_s=deadline_s)


def test_nothing_is_wanted_by_itself() -> None:
    assert Wishes(None).next(1e9) is None


def test_the_interval_starts_with_training_and_after_each_save() -> None:
    wishes = Wishes(10.0)
    assert wishes.next(1000.0) is None
    wishes.train(0.0)
    assert wishes.next(9.9) is None
    assert wishes.next(10.0) is False
    assert wishes.next(10.0) is False  # until it is committed
    wishes.committed()
    assert wishes.next(50.0) is None  # under way
    wishes.train(60.0)
    assert wishes.next(69.0) is None
    assert wishes.next(70.0) is False


def test_a_stop_comes_before_a_plain_checkpoint_and_once() -> None:
    wishes = Wishes(None)
    assert wishes.hear(Notice(kind=NoticeKind.PERSON, stop=False))
    assert wishes.hear(stop())
    assert wishes.next(0.0) is True
    wishes.stopped = True
    assert wishes.next(0.0) is None
    wishes.begin()
    assert wishes.next(0.0) is True  # the next cycle has to stop as well


def test_the_earliest_deadline_counts_and_repeats_say_nothing_new() -> None:
    wishes = Wishes(None)
    assert wishes.hear(stop())
    assert not wishes.hear(stop())
    assert wishes.hear(stop(deadline_s=100.0))
    assert not wishes.hear(stop(deadline_s=150.0))
    assert wishes.hear(stop(deadline_s=90.0))
    assert wishes.stop is not None
    assert wishes.stop.deadline_s == 90.0
    assert wishes.hear(stop(NoticeKind.PREEMPTION))
    assert wishes.stop.deadline_s == 90.0
