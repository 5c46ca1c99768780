"""The cap that is lifted while a drain runs, the pause for a checkpoint, and what is told meanwhile."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from shardworld import ITERATION, build

from slurm_resil.core import control, paths
from slurm_resil.core.errors import TryAgainError
from slurm_resil.core.progress import Meter, Progress
from slurm_resil.drain import pace
from slurm_resil.drain.orders import LOOK_S, Orders


def page(job_dir: str) -> control.ControlPage:
    return control.ControlPage.create(paths.control(job_dir), 2)


def test_a_cap_is_lifted_while_the_drain_runs(tmp_path):
    world = build(tmp_path, ranks=2, scale=40)
    world.seal()
    seen: list[Progress] = []

    def progress(one: Progress) -> None:
        seen.append(one)
        if len(seen) == 4:  # at this cap it would take a minute
            Orders(iteration=ITERATION, cap_bytes_s=None, finish=True).write(world.run_dir)

    begin = time.monotonic()
    world.drain(cap_bytes_s=5000.0, progress=progress)
    assert time.monotonic() - begin < 20
    assert any(one.waits == "the cap" for one in seen)
    assert any(one.rate_bytes_s > 0 and one.left_s is not None for one in seen)
    world.check()


@pytest.mark.parametrize("phase", ["write", "verify"])
def test_a_drain_that_is_cancelled_ends_and_the_next_one_goes_on(tmp_path, phase):
    world = build(tmp_path, ranks=2, scale=40)
    world.seal()
    told: list[tuple[str, Any]] = []
    ordered: list[Progress] = []

    def progress(one: Progress) -> None:
        if one.phase == phase and not ordered:  # once: the other mover may be here when the order is withdrawn already
            ordered.append(one)
            Orders(iteration=ITERATION, cap_bytes_s=None, cancel=True).write(world.run_dir)
            time.sleep(2 * LOOK_S)

    with pytest.raises(TryAgainError, match="stopped as asked"):
        world.drain(progress=progress, tell=lambda *one: told.append(one), buffer_bytes=8192)
    assert told[-1] == ("cancelled", {"iteration": ITERATION})
    assert not os.path.exists(paths.drained_manifest(world.run_dir, ITERATION))
    assert not os.path.exists(paths.drain_orders(world.run_dir))  # the next one does not hear it
    told.clear()
    world.drain(tell=lambda *one: told.append(one))
    assert [name for name, _ in told][:1] == ["resumed"]
    world.check()


def test_orders_that_come_while_the_file_is_read_back_are_heard(tmp_path):
    world = build(tmp_path, ranks=1, scale=40)
    world.seal()
    heard: list[Orders] = []

    def progress(one: Progress) -> None:
        if one.phase == "verify" and not heard:
            Orders(iteration=ITERATION, finish=True).write(world.run_dir)
            time.sleep(2 * LOOK_S)

    world.drain(progress=progress, heed=heard.append, cap_bytes_s=1e9)
    assert heard == [Orders(iteration=ITERATION, finish=True)]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"iteration": 40}', '{"iteration": 40, "cap_bytes_s": -1, "finish": 1}']
)
def test_orders_that_are_none(tmp_path, text):
    with open(paths.drain_orders(str(tmp_path)), "w") as file:
        file.write(text)
    assert Orders.read(str(tmp_path), ITERATION) is None


def test_orders_are_of_one_iteration(tmp_path):
    orders = Orders(iteration=ITERATION, cap_bytes_s=3.0)
    orders.write(str(tmp_path))
    assert Orders.read(str(tmp_path), ITERATION) == orders
    assert Orders.read(str(tmp_path), ITERATION + 1) is None
    assert Orders.read(str(tmp_path / "none"), ITERATION) is None


def test_when_a_checkpoint_is_being_taken(tmp_path):
    job = str(tmp_path)
    assert pace.taken(job) == 0
    made = page(job)
    words = made.words
    assert pace.taken(job) == 0
    words[control.PROPOSAL], words[control.DECISION] = 50, control.OPEN
    assert pace.taken(job) == 0  # nobody copies yet
    words[control.DECISION] = control.COMMIT
    assert pace.taken(job) == 50
    words[control.PROPOSAL] = 0
    assert pace.taken(job) == 0
    words[made.block(1) + control.SAVED] = 50  # handed over, being sealed
    assert pace.taken(job) == 50
    words[control.SEALED_ALL] = 50
    assert pace.taken(job) == 0
    words[made.block(0) + control.SAVED] = 60
    words[control.FAILED] = 60
    assert pace.taken(job) == 0


def test_a_drain_waits_for_a_checkpoint_and_not_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "PAUSE_S", 0.5)
    world = build(tmp_path, ranks=1, scale=20)
    world.seal()
    made = page(world.job_dir(0))
    made.words[control.PROPOSAL], made.words[control.DECISION] = 50, control.COMMIT
    seen: list[Any] = []
    begin = time.monotonic()
    world.drain(progress=seen.append, buffer_bytes=4096)
    assert 0.5 <= time.monotonic() - begin < 5  # once, not at every round
    assert any(one.waits == "the checkpoint of iteration 50 is being taken" for one in seen)
    world.check()


def test_a_drain_that_is_to_finish_does_not_wait(tmp_path):
    world = build(tmp_path, ranks=1)
    world.seal()
    made = page(world.job_dir(0))
    made.words[control.PROPOSAL], made.words[control.DECISION] = 50, control.COMMIT
    seen: list[Any] = []
    world.drain(progress=seen.append, finish=True)
    assert not any(one.waits for one in seen)


def test_rate_and_time_left():
    class Clock:
        time = 100.0

        def now(self) -> float:
            return self.time

        def sleep(self, seconds: float) -> None:
            self.time += seconds

    clock, seen = Clock(), []
    meter = Meter(seen.append, clock)
    meter.begin("write", 1000)
    meter.further(400, skipped=400)  # was there before: nothing is known of the rate
    assert seen[-1].rate_bytes_s == 0 and seen[-1].left_s is None and seen[-1].done_bytes == 400
    clock.sleep(2)
    meter.further(100)
    assert seen[-1].rate_bytes_s == 50 and seen[-1].left_s == 10
    clock.sleep(3)
    meter.waits("the checkpoint", lost_s=3)
    assert seen[-1].rate_bytes_s == 50 and seen[-1].waits == "the checkpoint"
