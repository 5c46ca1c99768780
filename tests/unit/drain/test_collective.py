"""The whole drain on threads: every kind of item, the balance, faults, the lease."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
from shardworld import ITERATION, Local, build, tile

from slurm_resil.comm import local
from slurm_resil.core import faults, paths, pins
from slurm_resil.core.errors import ConfigError, DataError, ResilError, SpaceError, TryAgainError
from slurm_resil.drain import collective, lease
from slurm_resil.drain.skeleton import skeleton
from slurm_resil.format.manifest import DrainedManifest, Extent


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (4, 1), (4, 2), (4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("buffer_bytes", [4096, 1 << 20])
def test_every_kind_of_item_arrives_bit_for_bit(tmp_path, ranks, per_node, buffer_bytes):
    world = build(tmp_path, ranks=ranks, per_node=per_node, scale=5)
    world.seal()
    outcome = world.drain(buffer_bytes=buffer_bytes)
    manifest = world.check()
    assert not outcome.already and outcome.manifest == manifest
    assert manifest.iteration == ITERATION and manifest.world_size == ranks
    for node in range(world.nodes):
        assert os.path.exists(paths.durable(world.job_dir(node), ITERATION))


@pytest.mark.parametrize("movers", [2, 4, 8])
def test_no_mover_writes_more_than_one_and_a_half_shares(tmp_path, movers):
    world = build(tmp_path, ranks=movers, scale=40)
    world.seal()
    written = world.drain().manifest.written_bytes
    assert len(written) == movers
    assert max(written) <= 1.5 * sum(written) / movers
    world.check()


def test_replicated_work_evens_out_what_only_some_hold(tmp_path):
    world = build(tmp_path, ranks=4)
    rng = np.random.default_rng(1)
    big = rng.standard_normal((1000, 50))
    world.expected["state/replicated"] = big
    for state in world.states:
        state["replicated"] = Local(big)
    alone = rng.standard_normal(10000)
    world.states[2]["alone"] = Local(alone, "private")
    world.expected["ranks/2/alone"] = alone
    world.seal()
    written = world.drain().manifest.written_bytes
    assert max(written) < 1.1 * sum(written) / 4
    world.check()


def test_counted_bytes_are_what_the_movers_really_write(tmp_path, monkeypatch):
    world = build(tmp_path, ranks=4, scale=5)
    world.seal()
    seen = [0] * 4
    write = local.LocalFile.write

    def counting(self, data, runs):
        seen[self._comm.rank] += runs.nbytes
        write(self, data, runs)

    monkeypatch.setattr(local.LocalFile, "write", counting)
    assert world.drain().written_bytes == tuple(seen)


def test_the_newest_complete_iteration_is_taken(tmp_path):
    world = build(tmp_path, ranks=2)
    world.seal(10, slot=0)
    world.seal(20, slot=1)
    world.seal_rank(0, world.states[0], 30, 2)
    outcome = world.drain(iteration=None)
    assert outcome.manifest.iteration == 20
    world.check(20)
    again = world.drain(iteration=None)
    assert again.already and again.manifest == outcome.manifest
    assert not os.path.exists(paths.drained_manifest(world.run_dir, 10))


def test_durable_already_writes_nothing_but_lost_marks(tmp_path):
    world = build(tmp_path, ranks=2)
    world.seal()
    world.drain()
    before = os.stat(paths.drained(world.run_dir, ITERATION))
    os.unlink(paths.durable(world.job_dir(1), ITERATION))
    assert world.drain().already
    after = os.stat(paths.drained(world.run_dir, ITERATION))
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert os.path.exists(paths.durable(world.job_dir(1), ITERATION))


def test_a_published_file_that_is_short_is_drained_again(tmp_path):
    world = build(tmp_path, ranks=2)
    world.seal()
    world.drain()
    os.truncate(paths.drained(world.run_dir, ITERATION), 100)
    assert not world.drain().already
    world.check()


@pytest.mark.parametrize("gone", [[1], [0, 3]])
def test_missing_shards_are_named_and_nothing_is_published(tmp_path, gone):
    world = build(tmp_path, ranks=4)
    world.seal()
    for rank in gone:
        os.unlink(paths.manifest(world.job_dir(rank), ITERATION, rank))
    with pytest.raises(TryAgainError) as caught:
        world.drain()
    assert f"rank{'s' if len(gone) > 1 else ''} {','.join(map(str, gone))} of 4" in str(caught.value)
    assert world.published() == [] and world.leftovers() == []


def test_a_node_without_any_directory_is_missing_shards_too(tmp_path):
    world = build(tmp_path, ranks=4, per_node=2)
    world.seal()
    os.rename(world.job_dir(1), world.job_dir(1) + "-away")
    with pytest.raises(TryAgainError, match="ranks 2-3 of 4"):
        world.drain()


def test_the_same_error_on_every_rank(tmp_path):
    world = build(tmp_path, ranks=3)
    world.seal()
    world.flip(1, "model/rows")
    errors = []

    def one(comm):
        with contextlib.suppress(ResilError):
            try:
                collective.drain(
                    comm,
                    run_dir=world.run_dir,
                    job_dir=world.job_dir(comm.rank),
                    iteration=ITERATION,
                    skeleton=skeleton,
                )
            except ResilError as error:
                errors.append((type(error), str(error)))

    local.run(3, one)
    assert len(errors) == 3 and len(set(errors)) == 1


@pytest.mark.parametrize(
    "name", ["model/rows", "model/columns", "model/strided", "model/same", "model/hsdp", "model/differs", "rng/cpu"]
)
def test_a_flipped_bit_is_found_before_publishing_and_named(tmp_path, name):
    world = build(tmp_path, ranks=4)
    world.seal()
    for rank in range(4):  # of what is replicated every copy: whoever writes it, it is wrong
        if rank == 2 or name in ("model/same", "model/hsdp"):
            world.flip(rank, name)
    with pytest.raises(DataError) as caught:
        world.drain()
    assert name in str(caught.value) and "rank 2 on node2" in str(caught.value)
    assert world.published() == [] and world.leftovers() == []


def test_a_changed_byte_in_the_file_is_told_from_a_bad_shard(tmp_path, monkeypatch):
    world = build(tmp_path, ranks=2)
    world.seal()
    sync = local.LocalFile.sync

    def rot(self):
        sync(self)
        if self._comm.rank == 0:
            with open(f"{world.run_dir}/.ckpt-{ITERATION:010d}.h5.part", "r+b") as file:
                place = file.read().index(world.expected["state/model/same"].tobytes())
                file.seek(place)
                file.write(b"\xff\xff\xff\xff")

    monkeypatch.setattr(local.LocalFile, "sync", rot)
    with pytest.raises(DataError, match=r"other bytes than were written.*model/same.*shards are right"):
        world.drain()
    assert world.published() == []


def test_a_truncated_slot_is_found_and_named(tmp_path):
    world = build(tmp_path, ranks=2)
    world.seal()
    os.truncate(world.slot(1), 5000)
    with pytest.raises(DataError, match=r"1-0\.h5 of rank 1 on node1 is truncated: 5000 of"):
        world.drain()
    os.unlink(world.slot(1))
    with pytest.raises(DataError, match="is missing"):
        world.drain()
    assert world.published() == [] and world.leftovers() == []


def test_a_slot_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    world = build(tmp_path, ranks=2, scale=20)
    world.seal()
    write = local.LocalFile.write

    def shrink(self, data, runs):
        os.truncate(world.slot(0), 5000)
        write(self, data, runs)

    monkeypatch.setattr(local.LocalFile, "write", shrink)
    with pytest.raises(DataError, match="rank 0 on node0 is truncated"):
        world.drain(buffer_bytes=4096)
    assert world.published() == [] and world.leftovers() == []


def test_torn_manifest(tmp_path):
    world = build(tmp_path, ranks=2)
    world.seal()
    path = paths.manifest(world.job_dir(1), ITERATION, 1)
    Path(path).write_bytes(Path(path).read_bytes().replace(b'"lr":0.5', b'"lr":0.6'))
    with pytest.raises(DataError, match=r"no shard of rank 1\).*does not match its own hash"):
        world.drain()


def test_shards_of_another_run_are_refused(tmp_path):
    world = build(tmp_path, ranks=2)
    world.seal()
    for rank in range(2):
        world.edit(rank, run_id="other")
    with pytest.raises(DataError, match="of run other"):
        world.drain()
    world.edit(0, run_id="run-7")
    with pytest.raises(DataError, match="different checkpoints"):
        world.drain()


def test_attempts_are_never_mixed(tmp_path):
    world = build(tmp_path, ranks=2)
    world.seal(attempt=0)
    world.edit(0, attempt=1)  # rank 1 had sealed this iteration in the attempt before only
    with pytest.raises(TryAgainError, match=r"not sealed by rank 1 of 2 \(attempt 1\)"):
        world.drain()
    world.edit(1, attempt=1)
    world.drain()
    assert world.check().attempt == 1


def test_stale_half_written_file_is_replaced(tmp_path):
    """S12."""
    world = build(tmp_path, ranks=2)
    world.seal()
    Path(world.run_dir, f".ckpt-{ITERATION:010d}.h5.part").write_bytes(b"half of something")
    Path(paths.drained(world.run_dir, ITERATION)).write_bytes(b"renamed, but its manifest never came")
    world.drain()
    world.check()


def test_no_run_directory(tmp_path):
    world = build(tmp_path, ranks=2)
    world.seal()
    os.rmdir(world.run_dir)
    with pytest.raises(ConfigError, match=r"run-7 does not exist"):
        world.drain()


@pytest.mark.parametrize("point", ["drain.rename", "drain.publish", "drain.round", "drain.verify"])
def test_storage_that_refuses_at_any_point_publishes_nothing(tmp_path, point):
    world = build(tmp_path, ranks=1)
    world.seal()
    faults.load(f"{point}:raise")
    with pytest.raises((SpaceError, OSError)):
        world.drain()
    assert not os.path.exists(paths.drained_manifest(world.run_dir, ITERATION))
    faults.load("")
    world.drain()
    world.check()


def test_too_little_space_is_said_with_both_sizes(tmp_path, monkeypatch):
    world = build(tmp_path, ranks=2)
    world.seal()
    real = os.statvfs

    def small(path):
        values = list(real(path))
        values[3] = values[4] = 1
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", small)
    with pytest.raises(SpaceError, match=r"has 4096 bytes free, the checkpoint needs \d+"):
        world.drain()


def test_stop_ends_on_every_rank_and_publishes_nothing(tmp_path):
    world = build(tmp_path, ranks=2, scale=50)
    world.seal()
    rounds = []
    with pytest.raises(TryAgainError, match="stopped as asked"):
        world.drain(buffer_bytes=4096, progress=rounds.append, stop=lambda: len(rounds) > 4)
    assert rounds[-1].phase == "write" and world.published() == []
    with pytest.raises(TryAgainError, match="stopped as asked"):
        world.drain(progress=rounds.append, stop=lambda: rounds[-1].phase == "verify")
    assert world.published() == []
    world.drain()
    world.check()


def test_progress_ends_at_the_total(tmp_path):
    world = build(tmp_path, ranks=2, scale=50)
    world.seal()
    seen = []
    world.drain(buffer_bytes=4096, progress=seen.append)
    writes = [p for p in seen if p.phase == "write"]
    assert writes[-1].done_bytes == writes[-1].total_bytes > 0
    assert any(p.phase == "verify" for p in seen)


def test_one_of_two_movers_of_the_same_iteration_gives_way(tmp_path):
    world = build(tmp_path, ranks=1)
    world.seal()
    held = lease.Lease(world.run_dir, ITERATION, owner="another mover")
    try:
        with pytest.raises(TryAgainError, match=r"being drained by process \d+ on .*another mover"):
            world.drain(lease_stale_s=30)
    finally:
        held.release()
    world.drain()
    world.check()


def test_a_mover_that_was_taken_over_publishes_nothing(tmp_path):
    world = build(tmp_path, ranks=1)
    world.seal()

    def take(progress):
        if progress.phase == "verify":
            Path(lease.path(world.run_dir, ITERATION)).write_text('{"token": "x", "host": "elsewhere", "pid": 4}')

    with pytest.raises(TryAgainError, match="taken over by process 4 on elsewhere"):
        world.drain(progress=take)
    assert world.published() == []


def test_done_by_another_while_waiting_for_its_lease(tmp_path):
    world = build(tmp_path, ranks=1)
    world.seal()
    world.drain()
    manifest = Path(paths.drained_manifest(world.run_dir, ITERATION))
    aside = manifest.rename(manifest.with_suffix(".aside"))
    Path(lease.path(world.run_dir, ITERATION)).write_text('{"token": "x", "host": "elsewhere", "pid": 4}')
    asked = []

    def stop():  # called while waiting for the lease to become stale
        if not asked:
            aside.rename(manifest)
        return bool(asked.append(1))

    assert world.drain(stop=stop).already and asked
    world.check()


def test_shards_are_pinned_while_they_are_read(tmp_path):
    world = build(tmp_path, ranks=1)
    world.seal()
    pinned = []

    def look(_):
        with pins.exclude(world.job_dir(0), ITERATION) as free:
            pinned.append(not free)

    world.drain(progress=look)
    assert pinned and all(pinned)
    with pins.exclude(world.job_dir(0), ITERATION) as free:
        assert free


def test_padding_outside_of_all_extents_is_left_out_and_still_checked(tmp_path):
    world = build(tmp_path, ranks=2)
    whole = np.arange(20, dtype=np.int32)
    parts = tile(whole, [[(0, 12), (12, 8)]])
    padded = np.concatenate([parts[1].data, np.full(4, -1, np.int32)])
    extents = (Extent(local=(0,), start=(12,), shape=(8,)),)
    world.states[0]["flat"], world.states[1]["flat"] = parts[0], Local(padded, "sharded", (20,), extents)
    world.expected["state/flat"] = whole
    world.seal()
    world.drain()
    world.check()
    os.unlink(paths.drained_manifest(world.run_dir, ITERATION))
    world.flip(1, "flat", at=35)
    with pytest.raises(DataError, match=r"of rank 1 on node1: the bytes of flat do not match"):
        world.drain()


def test_interleaved_parts_of_an_item(tmp_path):
    world = build(tmp_path, ranks=2)
    whole = np.arange(48, dtype=np.float32).reshape(4, 12)
    for rank in range(2):
        starts = [rank * 3, 6 + rank * 3]
        data = np.concatenate([whole[:, at : at + 3] for at in starts], axis=1)
        extents = tuple(Extent(local=(0, 3 * i), start=(0, at), shape=(4, 3)) for i, at in enumerate(starts))
        world.states[rank]["blocks"] = Local(data, "sharded", whole.shape, extents)
    world.expected["state/blocks"] = whole
    world.seal()
    world.drain()
    world.check()


def test_manifest_names_every_item_with_its_rank(tmp_path):
    world = build(tmp_path, ranks=2)
    world.seal()
    manifest = DrainedManifest.from_bytes(world.drain().manifest.to_bytes(), where="test")
    by_name = {(item.name, item.rank): item for item in manifest.items}
    assert by_name["model/rows", None].shape == (30, 17)
    assert by_name["model/empty", None].offset is None
    assert by_name["rng/cpu", 1].nbytes == 11
    assert by_name["values", 0].dtype == "json"


def test_durable_marks_do_not_pile_up(tmp_path):
    world = build(tmp_path, ranks=1)
    marks = os.path.dirname(paths.durable(world.job_dir(0), 1))
    for iteration in range(10, 60, 10):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(paths.manifest(world.job_dir(0), iteration - 20, 0))  # its slot is taken
        world.seal(iteration, slot=iteration // 10 % 2)
        world.drain(iteration=iteration)
        expected = [one for one in (iteration - 10, iteration) if one]
        assert sorted(os.listdir(marks)) == [f"{one:010d}.json" for one in expected]


def test_metrics_arrive_and_of_several_ranks_the_lowest_counts(tmp_path):
    world = build(tmp_path, ranks=4, per_node=2)
    world.seal()
    world.edit(3, metrics={"loss": 3.0, "accuracy": 0.5})
    world.edit(1, metrics={"loss": 1.0})
    world.edit(2, metrics={"loss": 2.0})
    assert world.drain().manifest.metrics == {"loss": 1.0, "accuracy": 0.5}
    world.check()
