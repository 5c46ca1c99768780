"""What the policy does with a drain that runs when the end is near, and when a person cancels it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from test_policy import OK, Bench, kinds

from slurm_resil.launch import moves as m
from slurm_resil.launch.policy import Rules


def test_the_drain_that_runs_goes_on_without_its_cap_at_an_end():
    b = Bench()
    b.on(m.SealedAll(iteration=40))
    b.on(m.DrainBegan(iteration=40))
    assert b.on(m.RanksEnded(verdict=OK), 3.0) == [m.HurryDrain(iteration=40, finish=True)]
    b.on(m.OrderTaken(iteration=40, finish=True), 1.0)
    assert b.tick(60.0) == []  # it has its time, there is no deadline
    assert b.drained(40)[-1] == m.Finish(code=0, words=OK.words, done=True)


def test_a_stop_at_the_iteration_that_is_drained_lifts_the_cap():
    b = Bench()
    b.on(m.SealedAll(iteration=44))
    b.on(m.DrainBegan(iteration=44))
    assert b.notice(deadline=30.0) == [m.HurryDrain(iteration=44, finish=False)]
    b.on(m.OrderTaken(iteration=44, finish=False))
    assert b.on(m.StopReached(iteration=44)) == [m.HurryDrain(iteration=44, finish=True)]
    b.on(m.OrderTaken(iteration=44, finish=True))
    assert b.tick(8.0) == []
    assert kinds(b.drained(44)) == [m.TellDurable]


def test_a_drain_that_does_not_hear_is_started_anew_in_a_bounded_time():
    b = Bench()
    b.on(m.SealedAll(iteration=40))
    b.on(m.DrainBegan(iteration=40))
    b.on(m.RanksEnded(verdict=OK))
    b.on(m.OrderTaken(iteration=30, finish=True))  # of another one
    b.on(m.OrderTaken(iteration=40, finish=False))  # of the cap alone
    assert b.tick(Rules.order_s - 1.0) == []
    assert kinds(b.tick(1.5)) == [m.CancelDrain]
    assert b.tick(5.0) == []  # once
    assert b.drained(40, ok=False) == [m.Drain(iteration=40, capped=False)]
    assert b.tick(60.0) == []  # that one has no cap


def test_a_drain_that_is_still_starting_is_not_started_anew():
    b = Bench()
    b.on(m.SealedAll(iteration=40))
    assert b.on(m.RanksEnded(verdict=OK)) == [m.HurryDrain(iteration=40, finish=True)]
    assert b.tick(Rules.start_s - 1.0) == []  # it reads its orders once it has started
    b.on(m.DrainBegan(iteration=40))
    assert b.tick(Rules.order_s - 1.0) == []
    b.on(m.OrderTaken(iteration=40, finish=True))
    assert b.tick(60.0) == []


def test_ranks_that_never_arrive_a_capped_drain_is_hurried_or_gives_way_to_a_newer_one():
    b = Bench()
    b.on(m.SealedAll(iteration=40))
    b.on(m.SealedAll(iteration=50))
    assert b.notice(deadline=20.0) == [m.HurryDrain(iteration=40, finish=False)]
    assert b.tick(9.0) == []
    assert kinds(b.tick(2.0)) == [m.CancelDrain]
    assert b.drained(40, ok=False) == [m.Drain(iteration=50, capped=False)]


def test_a_drain_that_a_person_cancels_is_not_begun_again_until_the_end():
    b = Bench()
    b.on(m.SealedAll(iteration=40))
    b.on(m.MoverEnded(iteration=40, ok=False, duration_s=2.0, cancelled=True))
    assert b.tick(10.0) == []
    assert b.on(m.SealedAll(iteration=50)) == [m.Drain(iteration=50, capped=True)]
    b.drained(50)
    b.on(m.SealedAll(iteration=60), 5.0)
    b.on(m.MoverEnded(iteration=60, ok=False, duration_s=2.0, cancelled=True))
    assert b.on(m.RanksEnded(verdict=OK)) == [m.Drain(iteration=60, capped=False)]
    # whoever cancels the last one, too, means it
    actions = b.on(m.MoverEnded(iteration=60, ok=False, duration_s=2.0, cancelled=True))
    assert kinds(actions) == [m.Finish] and "burst buffer only" in actions[0].words


def test_a_drain_that_the_sigterm_of_a_grace_period_ends_has_not_failed():
    """Slurm sends it to all steps, before anybody can order anything."""
    b = Bench()
    b.on(m.SealedAll(iteration=40))
    b.notice(deadline=12.0)
    reports = [
        one.event
        for one in b.policy.on(m.MoverEnded(iteration=40, ok=False, duration_s=2.0, stopped=True), b.now)
        if isinstance(one, m.Report)
    ]
    assert reports == ["drain_cancelled"]
    assert b.tick(3.0) == [m.Drain(iteration=40, capped=False)]  # at once when it is time for it, not after a wait
