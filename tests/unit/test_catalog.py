"""What is restorable: presence, quarantine, what can be deleted. No torch in here."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slurm_resil.catalog import LOST_KEPT, LocalCatalog, RunCatalog
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
    assert (local.sealed(), local.durable()) == ({}, set())
    assert (run.durable(), run.newest_restorable(), run.explain()) == ([], None, [])
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


def test_evidence_of_bad_shards_is_bounded(tmp_path):
    catalog = LocalCatalog(str(tmp_path))
    for number in range(LOST_KEPT + 5):
        shard(tmp_path, number + 1, 0)
        catalog.quarantine(number + 1, 0, "flipped bit")
    names = os.listdir(tmp_path / "manifests" / "lost")
    kept = {int(name[:10]) for name in names}
    assert kept == set(range(6, LOST_KEPT + 6)) and len(names) == 2 * LOST_KEPT  # the newest, with their reasons


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


def test_stock_tells_what_is_whole_from_all_else(tmp_path):
    for iteration in (10, 20, 30, 40, 50, 60, 70):
        drained(tmp_path, iteration)
    catalog = RunCatalog(str(tmp_path), run_id="r")
    os.truncate(paths.drained(str(tmp_path), 20), 1)
    os.unlink(paths.drained(str(tmp_path), 30))
    Path(paths.drained_manifest(str(tmp_path), 40)).write_bytes(b'{"torn')
    catalog.quarantine(50, "flipped")
    os.unlink(paths.drained_manifest(str(tmp_path), 60))
    Path(paths.drained_part(str(tmp_path), 80)).write_bytes(b"half")
    Path(paths.drained_kept(str(tmp_path), 10)).touch()
    (tmp_path / "ckpt-mine.h5").touch()
    (tmp_path / "events.jsonl").touch()
    stock = catalog.stock()
    assert [(one.iteration, one.by_hand) for one in stock.whole] == [(70, False), (10, True)]
    assert stock.evidence == (50, 30, 20)
    assert sorted(stock.spoiled) == [20, 30, 40]
    assert stock.unfinished == (80, 60)


def test_a_checkpoint_of_another_run_is_nobodys_to_count(tmp_path):
    drained(tmp_path, 10)
    stock = RunCatalog(str(tmp_path), run_id="other").stock()
    assert stock.whole == stock.evidence == stock.unfinished == ()
    assert "swapped" in stock.spoiled[10]


def test_what_cannot_be_read_is_unknown_and_not_bad(tmp_path):
    drained(tmp_path, 10)
    path = paths.drained_manifest(str(tmp_path), 10)
    os.rename(path, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path)  # as without permission, but for root too
    with pytest.raises(DataError, match="cannot read"):
        RunCatalog(str(tmp_path)).stock()


def test_a_storage_error_is_unknown_and_not_bad(tmp_path, monkeypatch):
    drained(tmp_path, 10)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fsio, "read_bytes", refuse)
    with pytest.raises(OSError, match="Input/output"):
        RunCatalog(str(tmp_path)).stock()


def test_a_manifest_is_read_once_and_again_when_it_is_another(tmp_path, monkeypatch):
    drained(tmp_path, 10)
    catalog = RunCatalog(str(tmp_path))
    reads = []
    load = DrainedManifest.load
    monkeypatch.setattr(DrainedManifest, "load", lambda path: reads.append(path) or load(path))
    assert [one.iteration for one in catalog.stock().whole] == [10]
    assert [one.iteration for one in catalog.stock().whole] == [10]
    assert len(reads) == 1
    os.truncate(paths.drained(str(tmp_path), 10), 1)
    assert catalog.stock().whole == ()  # its file is looked at each time
    drained(tmp_path, 10, size=200)
    assert [one.iteration for one in catalog.stock().whole] == [10]
    assert len(reads) == 2


def test_removing_leaves_what_is_another_ones(tmp_path):
    for iteration in (10, 20, 30):
        drained(tmp_path, iteration)
    catalog = RunCatalog(str(tmp_path))
    assert catalog.remove(10) == 100
    assert catalog.remove(10) == 0  # gone already
    assert catalog.durable() == [30, 20] and not os.path.exists(paths.drained(str(tmp_path), 10))
    assert catalog.remove_unfinished(20) == 0  # it has a manifest
    catalog.quarantine(20, "flipped")
    assert catalog.remove_unfinished(20) == 0  # it is evidence
    drained(tmp_path, 20, size=300)
    assert catalog.remove_evidence(20) == 0  # it was drained again meanwhile
    assert catalog.load(20).file_bytes == 300
    catalog.quarantine(30, "flipped")
    assert catalog.remove_evidence(30) == 100
    assert sorted(name for name in os.listdir(tmp_path) if "30" in name) == []
