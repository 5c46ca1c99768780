"""What is restorable: presence, quarantine, pruning. No torch in here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_resil.catalog import LocalCatalog, RunCatalog
from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError
from slurm_resil.core.model import CheckpointState
from slurm_resil.format.manifest import DrainedManifest, ShardManifest


def shard(job: Path, iteration: int, rank: int) -> None:
    (job / "manifests").mkdir(parents=True, exist_ok=True)
    ShardManifest(
        run_id="r",
        job_id=1,
        attempt=0,
        iteration=iteration,
        rank=rank,
        world_size=2,
        node="n",
        slot=f"{rank}-0.h5",
        generation=1,
        items=(),
        values=None,
    ).publish(paths.manifest(str(job), iteration, rank), sync=False)


def durable(job: Path, iteration: int) -> None:
    (job / "durable").mkdir(parents=True, exist_ok=True)
    fsio.write_json(paths.durable(str(job), iteration), {}, sync=False)


def drained(run: Path, iteration: int, size: int = 100) -> None:
    run.mkdir(exist_ok=True)
    file = paths.drained(str(run), iteration)
    Path(file).write_bytes(bytes(size))
    DrainedManifest(
        run_id="r",
        job_id=1,
        attempt=0,
        iteration=iteration,
        world_size=2,
        file=os.path.basename(file),
        file_bytes=size,
        block_bytes=4096,
        blocks=("x",),
        items=(),
    ).publish(paths.drained_manifest(str(run), iteration), sync=False)


def test_nothing_there(tmp_path):
    local, run = LocalCatalog(str(tmp_path / "none")), RunCatalog(str(tmp_path / "none"))
    assert (local.sealed(), local.durable(), local.prune(sealed_all=5)) == ({}, set(), [])
    assert (run.durable(), run.newest_restorable(), run.explain(), run.prune(keep=1)) == ([], None, [], [])
    assert local.quarantine(1, 0, "x") is None
    assert run.quarantine(1, "x") is None


def test_sealed_and_durable(tmp_path):
    for iteration, rank in ((10, 0), (10, 1), (20, 0)):
        shard(tmp_path, iteration, rank)
    (tmp_path / "manifests" / ".0000000030-000000.json.1.tmp").write_text("half")
    durable(tmp_path, 10)
    catalog = LocalCatalog(str(tmp_path))
    assert {i: sorted(ranks) for i, ranks in catalog.sealed().items()} == {10: [0, 1], 20: [0]}
    assert catalog.sealed()[20][0] == paths.manifest(str(tmp_path), 20, 0)
    assert catalog.durable() == {10}


def test_what_is_quarantined_is_no_candidate_any_more_and_the_reason_stays(tmp_path):
    for rank in (0, 1):
        shard(tmp_path, 10, rank)
    catalog = LocalCatalog(str(tmp_path))
    for time in range(2):
        went = catalog.quarantine(10, 0, "flipped bit")
        assert went is not None and os.path.exists(went)
        assert fsio.read_json(f"{went}.reason")["reason"] == "flipped bit"
        assert catalog.sealed() == {10: {1: paths.manifest(str(tmp_path), 10, 1)}}
        with pytest.raises(FileNotFoundError):
            catalog.load(10, 0)
        if time == 0:
            shard(tmp_path, 10, 0)  # sealed again, and bad again
    assert len(os.listdir(tmp_path / "manifests" / "lost")) == 4


def test_prune_forgets_only_what_is_durable_and_old(tmp_path):
    for iteration in (10, 20, 30, 40, 50):
        shard(tmp_path, iteration, 0)
    for iteration in (10, 20, 40, 50):
        durable(tmp_path, iteration)
    catalog = LocalCatalog(str(tmp_path))
    assert catalog.prune(sealed_all=0) == []
    assert catalog.prune(sealed_all=40, in_use=(20,)) == [10]  # 30 is not durable, 40 is the newest of all, 50 newer
    assert sorted(catalog.sealed()) == [20, 30, 40, 50]
    assert catalog.prune(sealed_all=50, keep=2) == [20]
    assert sorted(catalog.sealed()) == [30, 40, 50]
    assert catalog.prune(sealed_all=50, keep=0) == [40]
    assert sorted(catalog.sealed()) == [30, 50]


def test_newest_restorable_passes_over_what_is_not_whole(tmp_path):
    run = tmp_path / "r"
    for iteration in (10, 20, 30, 40, 50, 60):
        drained(run, iteration)
    os.truncate(paths.drained(str(run), 60), 99)
    os.unlink(paths.drained(str(run), 50))
    Path(paths.drained_manifest(str(run), 40)).write_bytes(b'{"torn')
    os.replace(paths.drained_manifest(str(run), 10), paths.drained_manifest(str(run), 35))
    (run / ".ckpt-70.h5.part").write_bytes(b"")
    catalog = RunCatalog(str(run))
    assert catalog.durable() == [60, 50, 40, 35, 30, 20]
    assert catalog.newest_restorable().iteration == 30
    assert catalog.newest_restorable(before=30).iteration == 20
    assert catalog.newest_restorable(exclude=(30, 20)) is None
    for iteration, fault in ((60, "truncated"), (50, "missing"), (35, "renamed")):
        with pytest.raises(DataError) as caught:
            catalog.load(iteration)
        assert caught.value.context["fault"] == fault
    states = {entry.iteration: (entry.state, entry.why) for entry in catalog.explain()}
    assert [i for i, (state, _) in states.items() if state == CheckpointState.DURABLE] == [30, 20]
    assert "truncated" in states[60][1] and "missing" in states[50][1] and "renamed" in states[35][1]
    assert states[70][0] == CheckpointState.DRAINING


def test_a_bad_drained_checkpoint_is_never_tried_twice(tmp_path):
    for iteration in (10, 20):
        drained(tmp_path, iteration)
    catalog = RunCatalog(str(tmp_path))
    assert catalog.quarantine(20, "block 3 is flipped") is not None
    assert catalog.quarantine(20, "another rank says so too") is None
    assert catalog.newest_restorable().iteration == 10
    assert os.path.exists(paths.drained(str(tmp_path), 20))  # evidence
    (lost,) = [entry for entry in catalog.explain() if entry.state == CheckpointState.LOST]
    assert (lost.iteration, lost.why) == (20, "block 3 is flipped")


def test_prune_of_a_run_counts_only_whole_ones(tmp_path):
    for iteration in (10, 20, 30, 40):
        drained(tmp_path, iteration)
    os.truncate(paths.drained(str(tmp_path), 40), 1)
    catalog = RunCatalog(str(tmp_path))
    assert catalog.prune(keep=2) == [10]
    assert catalog.prune(keep=0, protect=(20,)) == []
    assert catalog.prune(keep=0) == [20]
    assert catalog.durable() == [40, 30]
    assert not os.path.exists(paths.drained(str(tmp_path), 10))
