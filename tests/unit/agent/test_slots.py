from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resil.agent.slots import Slots, parse
from slurm_resil.core import paths, pins


@pytest.fixture
def job(tmp_path: Path) -> str:
    for name in ("manifests", "pins"):
        (tmp_path / name).mkdir()
    return str(tmp_path)


def seal(job: str, slots: Slots, iteration: int) -> None:
    Path(paths.manifest(job, iteration, 0)).write_text("{}")
    slots.sealed(iteration)


def sealed(job: str) -> list[int]:
    return sorted(found[0] for name in Path(job, "manifests").iterdir() if (found := paths.parse_manifest(name.name)))


def test_the_newest_that_all_have_is_never_given_away(job: str) -> None:
    slots = Slots(job, 0, 2)
    complete = 0

    def expendable(iteration: int) -> bool:
        return iteration < complete

    assert slots.lease(10, expendable) == 0
    seal(job, slots, 10)
    complete = 10
    assert slots.lease(20, expendable) == 1
    assert slots.lease(30, expendable) is None  # one is complete, one is being written
    seal(job, slots, 20)
    assert slots.lease(30, expendable) is None  # 20 is sealed here, but not by all
    assert sealed(job) == [10, 20]
    complete = 20
    assert slots.lease(30, expendable) == 0
    assert sealed(job) == [20]


def test_the_oldest_goes_first_and_pins_are_respected(job: str) -> None:
    slots = Slots(job, 0, 3)
    for iteration in (1, 2, 3):
        assert slots.lease(iteration, lambda _: False) is not None
        seal(job, slots, iteration)
    with pins.hold(job, 1), pins.hold(job, 1):
        assert slots.lease(4, lambda one: one < 3) == 1  # the second oldest
        assert sealed(job) == [1, 3]
        assert slots.lease(5, lambda one: one < 3) is None
    assert slots.lease(5, lambda one: one < 3) == 0
    assert sealed(job) == [3]


def test_a_slot_that_could_not_be_written_is_the_last_choice(job: str) -> None:
    """A burst buffer that fills up after two of three slots: those two are used again and again."""
    slots = Slots(job, 0, 3)
    for iteration in (10, 20):
        assert slots.lease(iteration, lambda _: False) is not None
        seal(job, slots, iteration)
    assert slots.lease(30, lambda one: one < 20) == 2
    slots.refuse(30)  # no space for it
    assert slots.lease(40, lambda one: one < 20) == 0
    seal(job, slots, 40)
    assert slots.lease(50, lambda one: one < 40) == 1
    assert slots.lease(60, lambda one: one < 40, last_try=False) is None  # worth waiting for one that is there
    assert slots.lease(60, lambda one: one < 40) == 2
    seal(job, slots, 60)  # there was space again: a slot like the others
    slots.free(60)
    assert slots.lease(70, lambda one: one < 40, last_try=False) == 2


def test_redundancy_goes_before_the_shard_that_it_is_of(job: str) -> None:
    seen: list[tuple[int, list[int]]] = []
    slots = Slots(job, 0, 2, lambda iteration: seen.append((iteration, sealed(job))))
    for iteration in (1, 2):
        slots.lease(iteration, lambda _: False)
        seal(job, slots, iteration)
    with pins.hold(job, 1):
        assert slots.lease(3, lambda one: one < 2) is None
    assert seen == []
    assert slots.lease(3, lambda one: one < 2) == 0
    assert seen == [(1, [1, 2])]
    assert slots.usable == 2
    slots.refuse(3)
    assert slots.usable == 1


def test_a_pin_comes_too_late_or_holds(job: str) -> None:
    Path(paths.manifest(job, 1, 0)).write_text("{}")
    with pins.exclude(job, 1) as mine, pins.exclude(job, 1) as other:
        assert (mine, other) == (True, False)
    with pins.hold(job, 1):
        with pins.exclude(job, 1) as mine:
            assert not mine
    assert not list(Path(job, "pins").iterdir()) or Path(paths.pin(job, 1)).exists()


def test_failed_saves_free_their_slot(job: str) -> None:
    slots = Slots(job, 0, 1)
    assert slots.lease(1, lambda _: False) == 0
    slots.free(1)
    assert slots.lease(2, lambda _: False) == 0
    assert slots.free_unsealed(lambda one: one == 2) == []
    assert slots.free_unsealed(lambda one: False) == [2]
    assert slots.lease(3, lambda _: False) == 0


def test_an_iteration_has_one_slot(job: str) -> None:
    slots = Slots(job, 0, 3)
    assert slots.lease(1, lambda _: True) == 0
    assert slots.lease(1, lambda _: True) is None
    seal(job, slots, 1)
    assert slots.lease(1, lambda _: True) is None


def test_a_slot_that_was_not_given_out_is_not_sealed(job: str) -> None:
    slots = Slots(job, 0, 2)
    assert slots.lease(1, lambda _: False) == 0
    assert not slots.sealing(0, 2)
    assert not slots.sealing(7, 1)
    assert slots.sealing(0, 1)


def test_newer_shards_of_another_past_are_discarded(job: str) -> None:
    slots = Slots(job, 0, 3)
    for iteration in (1, 2, 3):
        Path(paths.manifest(job, iteration, 0)).write_text("{}")
        slots.holds(iteration - 1, iteration)
    assert slots.discard_above(1) == [2, 3]
    assert sealed(job) == [1]


def test_names() -> None:
    assert parse("12-3.h5") == (12, 3)
    assert parse("../12-3.h5") is None
    assert parse("12-3.h5x") is None
