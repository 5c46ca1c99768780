from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_resil.agent import protocol as p
from slurm_resil.agent import slots
from slurm_resil.agent.desk import Desk
from slurm_resil.agent.survey import DRAINED, SHARDS
from slurm_resil.cli.agent import BurstBuffer
from slurm_resil.core import paths, pins
from slurm_resil.core.errors import SpaceError
from slurm_resil.format.manifest import ShardManifest


class Ears:
    """A rank's connection that keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any], *, timeout_s: float = 0.0) -> None:
        self.heard.append(message)


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_slot_that_cannot_be_given_names_the_directory_and_the_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "pins" / "0000000010"))

    store = BurstBuffer(str(tmp_path))
    desk = Desk(str(tmp_path), "llama", range(1), 2, store, tell=lambda _: None, later=lambda call: call())
    rank = desk.ranks[0]
    rank.channel = ears = Ears()  # type: ignore[assignment]
    monkeypatch.setattr(slots.Slots, "lease", refuse)
    desk.hear(rank, p.Lease(iteration=20, wait_s=5.0), 0.0)
    (said,) = ears.heard
    assert said["t"] == "NoSlot"
    assert f"in {tmp_path} of run llama: Permission denied; make" in said["reason"]
    assert "0000000010" not in said["reason"]
    desk.close()


def test_shards_that_are_not_this_runs_are_passed_over_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()

    def publish(name: int, **changes: Any) -> Path:
        values = {"run_id": "llama", "job_id": 1, "attempt": 4, "iteration": name, "rank": 0, "world_size": 2}
        values |= {"node": "n", "slot": "0-0.h5", "generation": 1, "items": (), "values": {}} | changes
        path = Path(paths.manifest(str(tmp_path), name, 0))
        ShardManifest(**values).publish(str(path), sync=False)
        return path

    good, fewer = publish(10), publish(20, world_size=1)
    other, renamed = publish(30, run_id="bert"), publish(40, iteration=39)
    store = BurstBuffer(str(tmp_path))
    desk = Desk(str(tmp_path), "llama", range(1), 2, store, tell=lambda _: None, later=lambda call: call())
    survey = desk.survey(2)
    assert survey.shards == [(10, 0, 4)]
    words = {iteration: why for iteration, _, why in survey.passed_over}
    assert f"of 1{p.OTHER_WORLD}2" in words[20]
    # two runs in one job: neither keeps the other one from beginning
    assert p.OTHER_WORLD not in words[30]
    assert "of run bert, this is llama" in words[30]
    assert "renamed: it is of iteration 39" in words[40]
    assert [path.exists() for path in (good, fewer, other, renamed)] == [True, True, True, False]
    desk.close()


class Node:
    """A burst buffer with shards of ranks that nobody has to run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("manifests", "slots"):
            (path / name).mkdir()

    def publish(self, iteration: int, rank: int, world: int, **changes: Any) -> Path:
        slot = f"{rank}-{iteration % 3}.h5"
        (self.path / "slots" / slot).touch()
        values = {
            "run_id": "llama",
            "job_id": 1,
            "attempt": 0,
            "iteration": iteration,
            "rank": rank,
            "world_size": world,
        }
        values |= {"node": "n", "slot": slot, "generation": 1, "items": (), "values": {}} | changes
        path = Path(paths.manifest(str(self.path), iteration, rank))
        ShardManifest(**values).publish(str(path), sync=False)
        return path

    def desk(self, ranks: range) -> Desk:
        store = BurstBuffer(str(self.path))
        return Desk(str(self.path), "llama", ranks, 3, store, tell=lambda _: None, later=lambda call: call())

    def left(self) -> dict[int, set[int]]:
        return {at: set(by_rank) for at, by_rank in BurstBuffer(str(self.path)).sealed().items()}

    def slots(self) -> set[str]:
        return {path.name for path in (self.path / "slots").iterdir()}


def test_shards_that_more_ranks_have_sealed_here(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for rank in range(4):
        for iteration in (10, 20, 30, 40):
            node.publish(iteration, rank, 4)
    os.unlink(paths.manifest(str(tmp_path), 20, 3))
    node.publish(30, 2, 4, attempt=1)
    Path(paths.manifest(str(tmp_path), 40, 3)).write_text("{}")
    desk = node.desk(range(2))
    survey = desk.survey(2)
    assert (survey.shards, survey.whole) == ([], [10])
    words = {at: why for at, _, why in survey.passed_over}
    assert set(words) == {20, 30, 40}
    assert f"of 4{p.OTHER_WORLD}2, and they are not all here: iteration 20: no shard of rank 3" in words[20]
    assert "attempt is 0 for rank 0 on n, 1 for rank 2 on n" in words[30]
    assert "is not a manifest" in words[40]
    desk.close()
    beside = node.desk(range(2))  # of several nodes: the other ranks cannot read here
    survey = beside.survey(4 - 1)
    assert (survey.shards, survey.whole) == ([], [])
    assert all("not all here" not in why for _, _, why in survey.passed_over)
    beside.close()


def test_staged_copies_go_when_all_ranks_have_loaded(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for name in (paths.staged(str(tmp_path), 10), paths.staged_manifest(str(tmp_path), 10)):
        os.makedirs(os.path.dirname(name), exist_ok=True)
        Path(name).touch()
    desk = node.desk(range(2))
    desk.survey(2)
    assert len(os.listdir(paths.fetched(str(tmp_path)))) == 2
    desk.continue_from(10)
    desk.close()
    assert os.listdir(paths.fetched(str(tmp_path))) == []


def test_shards_of_more_ranks_are_taken_out_together_and_cleared_in_the_end(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for rank in range(4):
        for iteration in (10, 20, 30):
            node.publish(iteration, rank, 4)
    node.publish(5, 7, 9, run_id="bert")
    desk = node.desk(range(2))
    assert sorted(desk.survey(2).whole) == [10, 20, 30]
    desk.lost([(30, SHARDS, "flipped"), (30, DRAINED, "flipped"), (77, 1, "not there")])
    assert node.left() == {5: {7}, 10: {0, 1, 2, 3}, 20: {0, 1, 2, 3}}
    desk.continue_from(10)
    assert node.left() == {5: {7}, 10: {0, 1, 2, 3}}  # 20 is of a past that has not come to be
    desk.all_sealed(10)
    assert node.left()[10] == {0, 1, 2, 3}  # what was restored is as expendable as an own one: not yet
    with pins.hold(str(tmp_path), 10):  # somebody reads it
        desk.all_sealed(11)
        assert node.left()[10] == {0, 1, 2, 3}
    with pytest.MonkeyPatch.context() as patch:  # it cannot be written there just now
        patch.setattr(pins, "_open", refuse)
        desk.all_sealed(12)
        assert desk.sealed_all == 12
    desk.all_sealed(13)
    assert node.left() == {5: {7}, 10: {0, 1}}
    assert {name.partition("-")[0] for name in node.slots()} == {"0", "1", "7"}
    desk.close()


class SlowStore(BurstBuffer):
    """Lays slots out when it is told to."""

    def __init__(self, job_dir: str) -> None:
        super().__init__(job_dir)
        self.go, self.made, self.fails = threading.Semaphore(0), list[int](), ""

    def prepare(self, rank: int, index: int, slots: int, layout: str) -> bool:
        assert self.go.acquire(timeout=10)
        if self.fails:
            raise SpaceError(self.fails)
        self.made.append(index)
        return layout == "a"


def preparing(tmp_path: Path) -> tuple[Desk, SlowStore, Ears, Callable[[int], list[dict[str, Any]]]]:
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    store, ears = SlowStore(str(tmp_path)), Ears()
    desk = Desk(str(tmp_path), "llama", range(1), 3, store, tell=lambda _: None, later=calls.put)
    desk.ranks[0].channel = ears  # type: ignore[assignment]

    def heard(count: int) -> list[dict[str, Any]]:
        """Let the agent's main thread go on until the rank has heard so much."""
        while len(ears.heard) < count:
            calls.get(timeout=10)()
        return ears.heard

    return desk, store, ears, heard


def test_slots_are_laid_out_ahead_one_by_one(tmp_path: Path) -> None:
    desk, store, ears, heard = preparing(tmp_path)
    rank = desk.ranks[0]
    desk.hear(rank, p.Prepare(layout="a"), 0.0)
    desk.hear(rank, p.Prepare(layout="a"), 0.0)
    assert ears.heard == [p.to_wire(p.Prepared(layout="a", indices=[], reason=p.AT_IT))]
    desk.hear(rank, p.Lease(iteration=1, wait_s=0.0), 0.0)
    assert ears.heard[1] == p.to_wire(p.Slot(iteration=1, index=1))  # nobody has begun that one
    store.go.release(9)
    assert heard(3)[2] == p.to_wire(p.Prepared(layout="a", indices=[0, 2], reason=""))
    assert store.made == [0, 2]
    desk.close()


def test_a_rank_waits_for_a_slot_that_is_being_laid_out(tmp_path: Path) -> None:
    desk, store, ears, heard = preparing(tmp_path)
    rank = desk.ranks[0]
    desk.hear(rank, p.Lease(iteration=1, wait_s=0.0), 0.0)
    desk.hear(rank, p.Lease(iteration=2, wait_s=0.0), 0.0)
    desk.hear(rank, p.Prepare(layout="a"), 0.0)
    desk.hear(rank, p.Lease(iteration=3, wait_s=0.0), 0.0)
    desk.serve_leases(1.0)
    assert len(ears.heard) == 2
    desk.serve_leases(10.0)
    assert ears.heard[2]["t"] == "NoSlot"
    desk.gone(rank)  # what is being laid out is nobody's to write, whoever comes
    rank.channel = ears  # type: ignore[assignment]
    desk.hear(rank, p.Lease(iteration=4, wait_s=0.0), 20.0)
    desk.hear(rank, p.Lease(iteration=5, wait_s=0.0), 20.0)
    assert [one["index"] for one in ears.heard[3:]] == [0, 1]
    desk.hear(rank, p.Lease(iteration=6, wait_s=0.0), 20.0)
    assert len(ears.heard) == 5
    store.go.release()
    assert heard(6)[5] == p.to_wire(p.Prepared(layout="a", indices=[2], reason=""))
    desk.serve_leases(21.0)
    assert ears.heard[6] == p.to_wire(p.Slot(iteration=6, index=2))
    desk.close()


def test_slots_that_cannot_be_laid_out_are_there_all_the_same(tmp_path: Path) -> None:
    desk, store, _, heard = preparing(tmp_path)
    rank = desk.ranks[0]
    store.go.release(9)
    desk.hear(rank, p.Prepare(layout="old"), 0.0)
    assert heard(1)[0] == p.to_wire(p.Prepared(layout="old", indices=[], reason="the state has another shape by now"))
    store.fails = "full"
    desk.hear(rank, p.Prepare(layout="a"), 0.0)
    assert "SpaceError: full" in heard(2)[1]["reason"]
    desk.hear(rank, p.Lease(iteration=1, wait_s=0.0), 0.0)
    assert heard(3)[2] == p.to_wire(p.Slot(iteration=1, index=0))
    desk.close()


def test_the_protected_iteration_keeps_its_slot_and_its_redundancy(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (tmp_path / "redundancy").mkdir()

    def encode(iteration: int) -> None:
        for path in (paths.parity(str(tmp_path), iteration, 0), paths.member(str(tmp_path), iteration, 0)):
            Path(path).touch()

    def left() -> set[str]:
        """Without the one that is kept to be written over."""
        return {path.name for path in (tmp_path / "redundancy").iterdir() if not path.name.endswith(".spare")}

    for iteration in (10, 20, 30):
        node.publish(iteration, 0, 1)
        encode(iteration)
    desk = node.desk(range(1))
    assert desk.survey(1).encoded == [10, 20, 30]
    desk.plan(p.Plan(number=1, cycle=0, iteration=20, sources=["local"], complete=20, protected=20))
    desk.continue_from(20)
    assert {name[:10] for name in left()} == {"0000000010", "0000000020"}  # 30 is of a past that has not come to be
    rank = desk.ranks[0]
    rank.channel = ears = Ears()  # type: ignore[assignment]
    for iteration in (40, 50):  # a free slot, then that of 10
        desk.hear(rank, p.Lease(iteration=iteration, wait_s=0.0), 0.0)
        node.publish(iteration, 0, 1)
        rank.slots.sealed(iteration)
        desk.all_sealed(iteration)
    assert [said["t"] for said in ears.heard] == ["Slot", "Slot"]
    assert {name[:10] for name in left()} == {"0000000020"}
    desk.hear(rank, p.Lease(iteration=60, wait_s=0.0), 0.0)
    assert ears.heard[-1]["t"] == "Slot"  # that of 40, although it is newer
    assert set(node.left()) == {20, 50}
    desk.close()
