"""The late drain: every node alone, in threads and in processes that die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from shardworld import ITERATION, RUN, World, build

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError, ResilError, TryAgainError
from slurm_resil.drain import choosing, late
from slurm_resil.drain.skeleton import skeleton

ROOT = Path(__file__).resolve().parents[3]
QUICK = late.Options(wait_s=2.0, stall_s=0.5, retry_s=0.0, lease_stale_s=0.5)


def own(world: World, node: int) -> choosing.Own:
    return choosing.Own(run_id=RUN, job_id=9, attempt=0, run_dir=world.run_dir, node=f"node{node}")


def attempt(world: World) -> None:
    """The record of the launcher that knows the nodes."""
    path = paths.attempt(world.run_dir, 0)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fsio.write_json(path, {"job_id": 9, "nodes": [f"node{node}" for node in range(world.nodes)]})


def made(tmp_path: Path, **options: int) -> World:
    world = build(tmp_path, **options)
    world.seal()
    attempt(world)
    return world


def node(world: World, number: int, options: late.Options = QUICK, **more: object) -> late.Outcome:
    return late.Late(own(world, number), world.job_dir(number), skeleton=skeleton, options=options, **more).run()


def together(world: World, *, apart_s: float = 0.0, options: late.Options = QUICK) -> list[late.Outcome]:
    def one(number: int) -> late.Outcome:
        time.sleep(number * apart_s)
        return node(world, number, options)

    with ThreadPoolExecutor(world.nodes) as pool:
        return list(pool.map(one, range(world.nodes)))


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (4, 1), (4, 2), (6, 2), (3, 1)])
def test_every_kind_of_item_arrives_bit_for_bit(tmp_path: Path, ranks: int, per_node: int) -> None:
    world = made(tmp_path, ranks=ranks, per_node=per_node, scale=5)
    outcomes = together(world)
    manifest = world.check()
    assert {outcome.manifest.iteration for outcome in outcomes} == {ITERATION}
    assert tuple(outcome.written_bytes for outcome in outcomes) == manifest.written_bytes
    assert not os.path.exists(os.path.join(world.run_dir, "late"))
    for number in range(world.nodes):
        assert os.path.exists(paths.durable(world.job_dir(number), ITERATION))


def test_the_file_is_that_of_the_movers(tmp_path: Path) -> None:
    one, other = made(tmp_path / "a", ranks=4, scale=5), made(tmp_path / "b", ranks=4, scale=5)
    together(one)
    other.drain()
    assert one.check().items == other.check().items  # HDF5 writes the time into the file itself


def test_nodes_that_come_one_after_the_other(tmp_path: Path) -> None:
    world = made(tmp_path, ranks=3)
    together(world, apart_s=0.7)
    world.check()


def test_a_node_that_never_comes_is_named_and_the_shards_stay(tmp_path: Path) -> None:
    world = made(tmp_path, ranks=3)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(node, world, number) for number in range(2)]
        for one in waiting:
            with pytest.raises(TryAgainError, match=r"not sealed by rank 2 .*node2 did not come"):
                one.result()
    assert world.published() == []
    record = fsio.read_json(paths.dropped(world.run_dir, ITERATION))
    assert "node2 did not come" in record["why"]
    assert record["kept"] is True
    assert len(world.manifest(0).items) > 0
    together(world)  # it comes after all
    world.check()
    assert not os.path.exists(paths.dropped(world.run_dir, ITERATION))


def test_what_is_complete_without_it_is_taken(tmp_path: Path) -> None:
    world = build(tmp_path, ranks=2)
    world.seal(20, slot=1)
    world.seal_rank(0, world.states[0], 30, 2)
    attempt(world)
    assert {outcome.manifest.iteration for outcome in together(world)} == {20}
    world.check(20)
    assert "iteration 30 is not sealed by rank 1" in fsio.read_json(paths.dropped(world.run_dir, 30))["why"]


def test_a_damaged_shard_makes_an_older_checkpoint_durable(tmp_path: Path) -> None:
    world = build(tmp_path, ranks=2)
    world.seal(20, slot=1)
    world.seal(ITERATION)
    attempt(world)
    world.flip(1, "model/same")
    assert {outcome.manifest.iteration for outcome in together(world)} == {20}
    world.check(20)


def test_nothing_is_to_be_done_twice(tmp_path: Path) -> None:
    world = made(tmp_path, ranks=2)
    together(world)
    again = together(world)
    assert [outcome.written_bytes for outcome in again] == [0, 0]
    assert again[0].manifest == world.check()


def test_it_goes_on_from_what_movers_have_written(tmp_path: Path) -> None:
    world = made(tmp_path, ranks=2, scale=400)
    rounds = iter(range(10**6))
    with pytest.raises(ResilError):
        world.drain(buffer_bytes=1 << 16, stop=lambda: next(rounds) > 12)
    part = Path(paths.drained_part(world.run_dir, ITERATION))
    before = part.stat().st_ino
    outcomes = together(world)
    manifest = world.check()
    assert Path(paths.drained(world.run_dir, ITERATION)).stat().st_ino == before
    assert sum(outcome.written_bytes for outcome in outcomes) < sum(manifest.written_bytes)


def test_storage_that_lies_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = made(tmp_path, ranks=2)
    write = os.pwrite

    def lying(fd: int, data: memoryview, offset: int) -> int:
        changed = bytearray(data)
        changed[0] ^= 1
        return write(fd, changed, offset)

    monkeypatch.setattr(os, "pwrite", lying)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(node, world, number) for number in range(2)]
        for one in both:
            with pytest.raises(DataError, match="reads back other bytes"):
                one.result()
    assert world.published() == []
    monkeypatch.undo()
    together(world)
    world.check()


def test_a_node_without_shards_has_nothing_to_do(tmp_path: Path) -> None:
    world = made(tmp_path, ranks=2)
    outcome = late.Late(own(world, 5), str(tmp_path / "none"), skeleton=skeleton, options=QUICK).run()
    assert outcome.manifest is None


def test_the_reading_back_of_a_node_that_is_gone_is_done_by_others(tmp_path: Path) -> None:
    world = made(tmp_path, ranks=3)
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(node, world, number) for number in (0, 2)]
        assert process(world, 1, "late.verify:kill").wait(30) == -9
        for one in others:
            assert one.result().manifest.iteration == ITERATION
    world.check()


SCRIPT = """
import sys
from slurm_resil.drain import choosing, late
from slurm_resil.drain.skeleton import skeleton
run_dir, job_dir, node = sys.argv[1:]
own = choosing.Own(run_id="run-7", job_id=9, attempt=0, run_dir=run_dir, node=node)
options = late.Options(wait_s=20, stall_s=0.5, retry_s=0, lease_stale_s=0.5, buffer_bytes=4096)
print(late.Late(own, job_dir, skeleton=skeleton, options=options).run().manifest.iteration)
"""


def process(world: World, number: int, fault: str = "") -> subprocess.Popen[str]:
    env = dict(os.environ, PYTHONPATH=str(ROOT), SLURM_RESIL_FAULT=fault)
    argv = [sys.executable, "-c", SCRIPT, world.run_dir, world.job_dir(number), f"node{number}"]
    return subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, text=True)


POINTS = ("late.heads", "late.choose", "drain.journal", "drain.round", "drain.sync", "late.write", "late.verify")


@pytest.mark.parametrize("point", [*POINTS, "drain.rename", "drain.publish"])
def test_a_process_that_is_killed_anywhere_is_gone_on_with(tmp_path: Path, point: str) -> None:
    world = made(tmp_path, ranks=2, scale=20)
    # both are killed where they get there: the second life of each has to cope with whatever is left
    first = [process(world, number, f"{point}:kill") for number in range(2)]
    codes = set()
    limit = time.monotonic() + 20
    while time.monotonic() < limit and not any(one.poll() is not None for one in first):
        time.sleep(0.05)
    codes = {one.poll() for one in first}
    assert -9 in codes, codes
    again = [process(world, number) for number in range(2)]
    assert [one.wait(40) for one in again] == [0, 0]
    for one in first:
        one.wait(40)
    world.check()


def test_two_that_finish_at_once_publish_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = made(tmp_path, ranks=4)
    published, gate = [], threading.Barrier(4)
    publish = late.Late._publish
    put = late.publishing.publish

    def all_at_once(self: late.Late, *rest: object) -> object:
        gate.wait(30)
        return publish(self, *rest)

    monkeypatch.setattr(late.Late, "_publish", all_at_once)
    monkeypatch.setattr(late.publishing, "publish", lambda *rest: (published.append(rest), put(*rest)))
    together(world)
    world.check()
    assert len(published) == 1


def test_a_node_that_comes_while_another_clears_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory goes from under it when it is about to tell what it has; by then all is durable."""
    world = made(tmp_path, ranks=2)
    together(world)
    os.unlink(paths.durable(world.job_dir(1), ITERATION))
    put, durable = late.h.fsio.write_atomic, late.Late._durable
    cleared, looks = [], []

    def write(path: str, data: bytes, **more: Any) -> None:
        if "heads-" in path and not cleared:
            cleared.append(path)
            late.h.Board(world.run_dir, 9, 0).clear()
        put(path, data, **more)

    def nothing_yet(self: late.Late, iteration: int | None = None) -> object:
        looks.append(iteration)
        return None if len(looks) == 1 else durable(self, iteration)

    monkeypatch.setattr(late.h.fsio, "write_atomic", write)
    monkeypatch.setattr(late.Late, "_durable", nothing_yet)
    assert node(world, 1).manifest == world.check()
    assert cleared and not os.path.exists(os.path.join(world.run_dir, "late"))


def test_only_what_was_looked_at_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = build(tmp_path, ranks=2)
    world.seal(20, slot=1)
    world.seal(ITERATION)
    own_of = {number: late.sealed.load(world.job_dir(number), ITERATION)[0] for number in range(2)}
    board = late.h.Board(world.run_dir, 9, 0)

    def tell(number: int) -> None:
        board.put(late.h.heads_name(f"node{number}"), late.h.Heads.of(f"node{number}", own_of[number], []))

    tell(0)
    board.settle(20)  # there is a newer one
    assert board.nodes() == {"node0"}
    torn = Path(board.path, late.h.heads_name("node1"))
    torn.write_text("{}")
    board.settle(ITERATION)  # nobody knows what that is of
    assert board.nodes() == {"node0", "node1"}
    torn.unlink()
    load = late.h.Heads.load

    def another_comes(path: str) -> object:
        tell(1)
        return load(path)

    monkeypatch.setattr(late.h.Heads, "load", another_comes)
    board.settle(ITERATION)
    monkeypatch.undo()
    assert board.nodes() == {"node1"}
    board.settle(ITERATION)
    assert not os.path.exists(board.path)


def test_a_directory_that_goes_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removes the parent between the making of the two."""
    mkdir, gone = os.mkdir, []

    def mkdir_late(path: Any, mode: int = 0o777) -> None:
        if str(path).endswith("9-0") and not gone:
            gone.append(path)
            os.rmdir(os.path.dirname(path))
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir_late)
    assert os.path.isdir(late.h.Board(str(tmp_path), 9, 0).path)
    assert gone
    (tmp_path / "late" / "9-1").write_text("in the way")
    with pytest.raises(FileExistsError):
        late.h.Board(str(tmp_path), 9, 1)


def test_what_the_job_says_of_itself_is_looked_at(tmp_path: Path) -> None:
    good = {"run_id": RUN, "job_id": 9, "attempt": 0, "world_size": 2, "run_dir": "/pfs/run-7", "node": "n1"}
    path = Path(paths.run_info(str(tmp_path)))
    for change in ({"run_dir": "pfs"}, {"node": "../x"}, {"node": ""}, {"job_id": "x"}):
        path.write_text(json.dumps(good | change))
        with pytest.raises(ResilError, match=r"run\.json"):
            choosing.Own.read(str(tmp_path))
    path.write_text(json.dumps(good))
    assert choosing.Own.read(str(tmp_path)).node == "n1"
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(ResilError, match=r"run\.json"):
        choosing.Own.read(str(tmp_path))
