"""Calls that take very long are told while they last, and others are not."""

from __future__ import annotations

import time

from slurm_resil.core.hangs import HangWatch


def test_a_long_call_is_told_while_it_lasts_and_when_it_is_over():
    told = []
    with HangWatch(lambda *one: told.append(one), first_s=0.1) as watch:
        with watch.inside("writing x"):
            time.sleep(0.55)
            assert len(told) >= 2  # more and more seldom
        assert all((doing, over) == ("writing x", False) for doing, _, over in told[:-1])
        seconds = [lasts for _, lasts, _ in told]
        assert seconds == sorted(seconds) and 0.1 <= seconds[0] < 0.4
        assert told[-1][0] == "writing x" and told[-1][1] >= 0.5 and told[-1][2]
        before = len(told)
        time.sleep(0.3)
    assert len(told) == before


def test_what_gets_on_is_not_told():
    told = []
    with HangWatch(lambda *one: told.append(one), first_s=0.3) as watch:
        with watch.inside("reading"):
            for _ in range(10):
                time.sleep(0.05)
                watch.further()
        for _ in range(10):
            with watch.inside("writing"):
                time.sleep(0.05)
        time.sleep(0.4)  # not in a call
    assert told == []


def test_the_outer_call_begins_again_after_an_inner_one():
    told = []
    with HangWatch(lambda *one: told.append(one), first_s=0.2) as watch:
        with watch.inside("outer"):
            with watch.inside("inner"):
                time.sleep(0.35)
            time.sleep(0.1)
    assert {doing for doing, _, _ in told} == {"inner"} and told[-1][2]
