"""A drain that did not come to its end, and the next one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shardworld import ITERATION, World, build

from slurm_resil.comm import local
from slurm_resil.core import faults, paths
from slurm_resil.core.errors import DataError, SpaceError, StorageError, TryAgainError
from slurm_resil.drain import journaling, lease, pace
from slurm_resil.drain.part import _line
from slurm_resil.drain.patience import Patience


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal grows with every round."""
    monkeypatch.setattr(journaling, "SYNC_BYTES", 1)
    monkeypatch.setattr(journaling, "SYNCS", 1 << 40)


def begun(root: Path, *, share: float = 0.9, ranks: int = 4, scale: int = 40, **more: Any) -> World:
    """A world whose drain was stopped."""
    world = build(root, ranks=ranks, scale=scale, **more)
    world.seal()
    interrupt(world, share)
    return world


def interrupt(world: World, share: float) -> None:
    """Drain and stop when so much is written."""
    seen: list[Any] = []

    def stop() -> bool:
        return bool(seen) and seen[-1].phase == "write" and seen[-1].done_bytes >= share * seen[-1].total_bytes

    with pytest.raises(TryAgainError, match="stopped as asked"):
        world.drain(buffer_bytes=4096, progress=seen.append, stop=stop)
    assert world.published() == []


def told(world: World, **options: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Drain; returns the outcome and what people were told, by name."""
    events: dict[str, dict[str, Any]] = {}
    outcome = world.drain(tell=lambda name, fields: events.__setitem__(name, dict(fields)), **options)
    world.check()
    return outcome, events


def total(outcome: Any) -> int:
    return sum(item.nbytes for item in outcome.manifest.items)


def journal(world: World) -> Path:
    return Path(paths.drained_journal(world.run_dir, ITERATION))


def regroup(world: World, per_node: int) -> None:
    """Give the shards to other nodes, so that there is another number of movers."""
    place = world.root / "regrouped"
    dirs = []
    for node in range(-(-world.ranks // per_node)):
        dirs.append(str(place / f"node{node}"))
        for rank in range(node * per_node, min(world.ranks, (node + 1) * per_node)):
            shutil.copytree(world.job_dir(rank // world.per_node), dirs[-1], dirs_exist_ok=True)
    world.job_dirs, world.per_node = dirs, per_node


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_only_what_is_missing_is_written(tmp_path, share):
    world = begun(tmp_path, share=share)
    outcome, events = told(world)
    assert sum(outcome.written_bytes) <= (1 - share + 0.05) * total(outcome)
    assert events["resumed"]["kept_bytes"] == total(outcome) - sum(outcome.written_bytes)
    assert events["resumed"]["refuted_bytes"] == 0
    assert not journal(world).exists()


@pytest.mark.parametrize("per_node", [2, 3, 4])
@pytest.mark.parametrize("buffer_bytes", [4096, 100_000])
def test_another_number_of_movers_goes_on_too(tmp_path, per_node, buffer_bytes):
    world = begun(tmp_path, share=0.9)
    regroup(world, per_node)
    outcome, _ = told(world, buffer_bytes=buffer_bytes)
    assert len(outcome.written_bytes) == world.nodes
    assert sum(outcome.written_bytes) <= 0.15 * total(outcome)


def test_again_and_again(tmp_path):
    world = begun(tmp_path, share=0.2)
    for share in (0.4, 0.6, 0.8):
        interrupt(world, share)
    outcome, _ = told(world)
    assert sum(outcome.written_bytes) <= 0.25 * total(outcome)


def test_a_torn_line_ends_the_journal(tmp_path):
    world = begun(tmp_path)
    lines = journal(world).read_bytes().splitlines(keepends=True)
    assert len(lines) > 10
    journal(world).write_bytes(b"".join(lines[:6]) + lines[6][:-9])
    interrupt(world, 0.7)  # goes on, and writes after what is left of the journal
    again = journal(world).read_bytes().splitlines(keepends=True)
    assert again[:6] == lines[:6] and len(again) > 6
    assert all(json.loads(line) for line in again)
    outcome, events = told(world)
    assert 0 < events["resumed"]["kept_bytes"] < 0.9 * total(outcome)


def test_what_is_claimed_is_looked_at(tmp_path):
    """As after a power loss: the journal is there, and of the file some blocks are not."""
    world = begun(tmp_path)
    part = Path(paths.drained_part(world.run_dir, ITERATION))
    place = part.read_bytes().index(world.expected["state/model/columns"].tobytes())
    with part.open("r+b") as file:
        file.seek(place)
        file.write(bytes(3000))
    outcome, events = told(world)
    assert events["resumed"]["refuted_bytes"] > 0
    assert sum(outcome.written_bytes) <= 0.3 * total(outcome)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("attempt", "it is of attempt 0"),
        ("contents", "the shards were sealed again since then"),
        ("tensors", "it holds other tensors"),
        ("structure", "its structure is damaged"),
        ("length", "its structure is damaged"),
        ("no file", "there is a journal without its file"),
        ("journal", "its journal is torn"),
        ("version", "it was written by another version"),
    ],
)
def test_what_is_of_something_else_is_never_gone_on_with(tmp_path, change, why):
    world = begun(tmp_path)
    part = paths.drained_part(world.run_dir, ITERATION)
    if change == "attempt":
        for rank in range(4):
            world.edit(rank, attempt=1)
    elif change == "contents":
        world.states[1]["rng/cpu"].data = np.array(world.states[1]["rng/cpu"].data[::-1])
        world.expected["ranks/1/rng/cpu"] = world.states[1]["rng/cpu"].data
        world.seal()
    elif change == "tensors":
        for rank, state in enumerate(world.states):
            del state["model/empty"], state["rng/cpu"]
            del world.expected[f"ranks/{rank}/rng/cpu"]
        del world.expected["state/model/empty"]
        world.seal()
    elif change == "structure":
        with open(part, "r+b") as file:
            file.seek(30)
            file.write(b"\xff\xff")
    elif change == "length":
        os.truncate(part, 5000)
    elif change == "no file":
        os.unlink(part)
    elif change == "journal":
        journal(world).write_bytes(b"{torn")
    elif change == "version":
        header, *rest = journal(world).read_bytes().splitlines(keepends=True)
        value = json.loads(header)
        del value["~"]
        value["identity"]["version"] = 99
        journal(world).write_bytes(_line(value) + b"".join(rest))
    outcome, events = told(world)
    assert events["starts_over"]["why"] == why and "resumed" not in events
    assert sum(outcome.written_bytes) == total(outcome)


def test_the_iteration_sealed_again_by_another_attempt_is_never_mixed_in(tmp_path):
    world = begun(tmp_path)
    other = build(tmp_path, ranks=4, scale=40, seed=5)
    other.seal(attempt=1)
    outcome, events = told(other)
    assert "starts_over" in events and sum(outcome.written_bytes) == total(outcome)
    assert world.published() == other.published()


@pytest.mark.parametrize("point", ["drain.verify", "drain.rename", "drain.publish"])
def test_after_the_last_byte_nothing_is_written_again(tmp_path, point):
    world = build(tmp_path, ranks=1, scale=20)
    world.seal()
    faults.load(f"{point}:raise")
    with pytest.raises(SpaceError, match="injected"):
        world.drain()
    assert not os.path.exists(paths.drained_manifest(world.run_dir, ITERATION))
    faults.load("")
    outcome, events = told(world)
    assert sum(outcome.written_bytes) == 0 and events["resumed"]["kept_bytes"] == total(outcome)


@pytest.mark.parametrize(
    "point", ["drain.round:raise@4", "drain.sync:raise@3", "drain.journal:raise", "drain.verify:raise"]
)
def test_storage_that_refuses_once_is_tried_again(tmp_path, point, monkeypatch):
    monkeypatch.setattr("slurm_resil.drain.patience.FIRST_S", 0.05)
    world = build(tmp_path, ranks=1, scale=20)
    world.seal()
    faults.load(point)
    outcome, events = told(world, buffer_bytes=4096, retry_s=3.0)
    assert "injected" in events["retry"]["error"] and events["retry"]["in_s"] > 0
    if "round" in point or "verify" in point:
        assert events["resumed"]["refuted_bytes"] == 0
        assert sum(outcome.written_bytes) <= 1.5 * total(outcome)


def test_patience_ends_and_what_is_useful_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("slurm_resil.drain.patience.FIRST_S", 0.05)
    world = begun(tmp_path, ranks=2)
    faults.load("drain.verify:raise@*")
    events = []
    with pytest.raises(SpaceError, match="injected at drain"):
        world.drain(retry_s=0.3, tell=lambda name, fields: events.append((name, fields)))
    waits = [fields["in_s"] for name, fields in events if name == "retry"]
    assert waits[::2] == pytest.approx([0.05, 0.1, 0.15])  # both ranks tell
    assert world.published() == [] and journal(world).exists()
    faults.load("")
    outcome, _ = told(world)
    assert sum(outcome.written_bytes) == 0


def test_a_damaged_shard_leaves_nothing(tmp_path):
    world = begun(tmp_path, ranks=2)
    world.flip(1, "model/rows")
    with pytest.raises(DataError, match="rank 1 on node1"):
        world.drain()
    assert world.leftovers() == [] and world.published() == []


@pytest.mark.parametrize("number", ["ESTALE", "EIO", "EDQUOT", "ENOSPC"])
def test_errors_of_storage_at_a_write(tmp_path, monkeypatch, number):
    monkeypatch.setattr("slurm_resil.drain.patience.FIRST_S", 0.05)
    world = build(tmp_path, ranks=2, scale=20)
    world.seal()
    write = local.LocalFile.write
    left = [3]

    def refuse(self, data, runs):
        write(self, data, runs)
        if self._comm.rank == 1:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    monkeypatch.setattr(local.LocalFile, "write", refuse)
    outcome, events = told(world, buffer_bytes=4096, retry_s=3.0)
    assert os.strerror(getattr(errno, number)) in events["retry"]["error"]
    assert sum(outcome.written_bytes) < 1.2 * total(outcome)
    left[0] = 1
    os.unlink(paths.drained_manifest(world.run_dir, ITERATION))
    with pytest.raises((SpaceError, StorageError)):
        world.drain(buffer_bytes=4096)
    assert not os.path.exists(paths.drained_manifest(world.run_dir, ITERATION))


def test_a_sync_that_fails_claims_nothing(tmp_path, monkeypatch):
    """After it the pages may be clean and their bytes nowhere: they are written again."""
    monkeypatch.setattr("slurm_resil.drain.patience.FIRST_S", 0.05)
    world = build(tmp_path, ranks=1, scale=40)
    world.seal()
    sync, asked = journaling.write_out, []

    def fail(fd):
        asked.append(fd)
        if len(asked) == 6:
            raise OSError(5, "Input/output error")
        sync(fd)

    monkeypatch.setattr(journaling, "write_out", fail)
    outcome, events = told(world, buffer_bytes=4096, retry_s=3.0)
    assert "Input/output error" in events["retry"]["error"]
    assert total(outcome) < sum(outcome.written_bytes) < total(outcome) + 5 * 4096


def test_what_was_taken_over_is_left_to_the_other_one(tmp_path):
    world = build(tmp_path, ranks=1, scale=20)
    world.seal()

    def take(progress):
        if progress.phase == "verify":
            Path(lease.path(world.run_dir, ITERATION)).write_text('{"token": "x", "host": "elsewhere", "pid": 4}')

    with pytest.raises(TryAgainError, match="taken over by process 4 on elsewhere"):
        world.drain(progress=take)
    assert os.path.exists(paths.drained_part(world.run_dir, ITERATION)) and journal(world).exists()


def test_a_newer_checkpoint_clears_what_older_drains_have_left(tmp_path):
    world = begun(tmp_path, ranks=2)
    Path(paths.drained_part(world.run_dir, ITERATION + 20)).write_bytes(b"newer")
    held = lease.Lease(world.run_dir, ITERATION - 10)
    Path(paths.drained_part(world.run_dir, ITERATION - 10)).write_bytes(b"at work")
    try:
        world.seal(ITERATION + 10, slot=1)
        world.drain(iteration=ITERATION + 10)
    finally:
        held.release()
    assert sorted(world.leftovers()) == [".ckpt-0000000030.h5.part", ".ckpt-0000000060.h5.part"]


def test_patience():
    patience = Patience(10.0)
    assert [patience.next(0) for _ in range(5)] == [1.0, 2.0, 4.0, 3.0, None]
    assert patience.next(5) == 1.0 and patience.next(5) == 2.0
    assert Patience(0).next(0) is None


def test_rounds_are_small_enough_for_the_goal():
    # two rounds are lost, and what the sync and the journal are behind
    assert 2 / pace._ROUNDS + 2 * journaling._BEHIND / journaling.SYNCS <= 0.05


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("keep", [None, "strided", "uneven", "replicated"])
def test_no_mover_really_writes_more_than_one_and_a_half_shares(tmp_path, monkeypatch, keep, per_node):
    """Strided, uneven and replicated states, counted where the bytes go to the file."""
    kinds = {
        "strided": ("model/strided", "model/cube"),
        "uneven": ("model/rows", "model/columns"),
        "replicated": ("model/same", "model/hsdp", "optim/scalar"),
    }
    world = build(tmp_path, ranks=8, per_node=per_node, scale=40)
    if keep is not None:
        for state in world.states:
            for name in set(state) - set(kinds[keep]):
                del state[name]
        world.expected = {f"state/{name}": world.expected[f"state/{name}"] for name in kinds[keep]}
    world.seal()
    seen = [0] * world.nodes
    write = local.LocalFile.write

    def counting(self, data, runs):
        seen[self._comm.rank] += runs.nbytes
        write(self, data, runs)

    monkeypatch.setattr(local.LocalFile, "write", counting)
    outcome = world.drain(buffer_bytes=65536)
    world.check()
    assert outcome.written_bytes == tuple(seen)
    assert max(seen) <= 1.5 * sum(seen) / len(seen)
