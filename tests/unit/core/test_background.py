"""Threads beside the caller: shared work, its errors, and helpers that are busy with something else."""

from __future__ import annotations

import functools
import threading
import time
import weakref

import pytest

from slurm_resil.core.background import CREW, Background, crew, share


@pytest.fixture
def helpers():
    made = [Background("helper"), Background("helper")]
    yield made
    for one in made:
        one.close()


def test_a_call_that_is_done_holds_on_to_nothing(helpers):
    class Large:
        pass

    large = Large()
    gone = weakref.ref(large)
    helpers[0].put(functools.partial(id, large))
    del large
    assert helpers[0].settle(20)
    assert gone() is None


def test_every_portion_is_done_once_and_by_several(helpers):
    together = threading.Barrier(3, timeout=20)
    done = []

    def call(portion: int) -> None:
        if portion < 3:
            together.wait()  # three threads have one each, or this times out
        done.append((portion, threading.current_thread().name))

    share(call, iter(range(500)), helpers)
    assert sorted(portion for portion, _ in done) == list(range(500))
    assert {name for _, name in done} >= {"helper", threading.current_thread().name}


def test_the_caller_does_not_wait_for_a_helper_that_is_busy(helpers):
    release = threading.Event()
    for one in helpers:
        one.put(lambda: release.wait(20) and None)
    done = []
    share(done.append, range(5), helpers)
    assert done == list(range(5))
    release.set()
    for one in helpers:
        assert one.settle(20)  # what it was asked for meanwhile finds nothing to do
    assert done == list(range(5))


@pytest.mark.parametrize("helped", [False, True])
def test_an_error_of_any_thread_is_the_callers_and_ends_the_work(helpers, helped):
    seen = []

    def call(portion: int) -> None:
        seen.append(portion)
        if portion == 3:
            raise MemoryError("portion 3")
        time.sleep(0.001)

    with pytest.raises(MemoryError, match="portion 3"):
        share(call, range(10_000), helpers if helped else ())
    count = len(seen)
    assert count < 100
    time.sleep(0.05)
    assert len(seen) == count  # nobody is at it after the error was raised


def test_a_crew_has_one_at_least_and_few_at_most():
    for processes in (1, 64):
        made = crew("helper", processes)
        assert 1 <= len(made) <= CREW
        for one in made:
            one.close()
