"""Each thing that can be wrong with a shard is found, and told apart from the others."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ckptworld as w
import pytest
import torch

from slurm_resil.catalog import LocalCatalog
from slurm_resil.ckpt import seal
from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.restore import restore_local
from slurm_resil.ckpt.snapshot import Arena
from slurm_resil.ckpt.source import LocalSource
from slurm_resil.core import paths
from slurm_resil.core.background import Background
from slurm_resil.core.errors import DataError
from slurm_resil.format import contents
from slurm_resil.format.manifest import ShardManifest, digest

pytestmark = pytest.mark.torch

STATE = {"a": torch.arange(1000.0), "b": torch.arange(7), "empty": torch.empty(0)}


@pytest.fixture
def job(tmp_path):
    """Two ranks, two iterations, another run in a directory of its own."""
    path = w.job(tmp_path)
    for rank in (0, 1):
        arena = Arena(path, rank, slots=2)
        for iteration in (1, 2):
            state = {**STATE, "b": torch.arange(7) + 10 * rank + iteration}
            w.save(arena, path, state, index=iteration - 1, iteration=iteration, world_size=2)
        arena.close()
    return path


def manifest(job: str, iteration: int = 1, rank: int = 0) -> ShardManifest:
    return ShardManifest.load(paths.manifest(job, iteration, rank))


def fault(job: str, one: ShardManifest) -> str:
    with pytest.raises(DataError) as caught:
        seal.verify(job, one)
    assert caught.value.exit_code == 65
    return str(caught.value.context["fault"])


def test_good_shards_verify_and_hashes_are_of_the_bytes(job):
    for rank in (0, 1):
        for iteration in (1, 2):
            seal.verify(job, manifest(job, iteration, rank))
    one = manifest(job)
    assert {item.name: item.xxh3 for item in one.items} == {
        "a": digest(STATE["a"].numpy().tobytes()),
        "b": digest((STATE["b"] + 1).numpy().tobytes()),
        "empty": digest(b""),
    }
    assert set(one.costs_s) == {"copy", "layout", "seal"}


def test_missing_truncated_flipped(job):
    one, path = manifest(job), paths.slot(job, 0, 0)
    for item in one.items[:2]:
        w.flip(path, item.offset + item.nbytes - 1)
        assert fault(job, one) == "flipped"
        w.flip(path, item.offset + item.nbytes - 1)
    seal.verify(job, one)
    for size in (one.items[1].offset + one.items[1].nbytes - 1, 4096, 100, 0):
        os.truncate(path, size)
        assert fault(job, one) == "truncated"
    os.unlink(path)
    assert fault(job, one) == "missing"
    os.symlink("/etc/passwd", path)
    with pytest.raises(OSError):
        seal.verify(job, one)


def test_no_byte_of_a_sealed_slot_changes_unseen(job):
    """Stamp, superblock, object headers and padding too, at a restore as well."""
    one, path = manifest(job), paths.slot(job, 0, 0)
    size, before = os.path.getsize(path), Path(path).read_bytes()
    for at in [*range(600), *range(4000, 4600), *range(600, size, 13), size - 1]:
        w.flip(path, at)
        with pytest.raises(DataError):
            seal.verify(job, one)
        w.flip(path, at)
    assert Path(path).read_bytes() == before
    seal.verify(job, one)
    w.flip(path, 4096 + 8)  # HDF5's superblock
    with pytest.raises(DataError, match="superblock"), LocalSource(job, one) as source:
        source.verify([])
    with open(path, "ab") as file:
        w.flip(path, 4096 + 8)
        file.write(b"more")
    assert fault(job, one) == "flipped"


def test_a_manifest_from_before_the_frame_was_hashed_is_read(job):
    path = paths.manifest(job, 1, 0)
    body = json.loads(Path(path).read_bytes())
    del body["frame"], body["check"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    Path(path).write_text(json.dumps({**body, "check": digest(text.encode())}))
    old = manifest(job)
    assert old.frame == ""
    w.flip(paths.slot(job, 0, 0), 4096 + 8)  # nothing to compare it with
    seal.verify(job, old)


def test_stale(job):
    """The slot was written again, by this arena or by one that laid it out anew."""
    old = manifest(job)
    w.save_new(job, STATE, iteration=3, world_size=2)
    assert fault(job, old) == "stale"
    assert not os.path.exists(paths.manifest(job, 1, 0))  # presence means valid


def test_torn(job):
    arena = Arena(job, 0, slots=2)
    draft = arena.write(0, flatten(STATE), iteration=3, run=w.run_info(world_size=2), node="n")
    slot = paths.slot(job, 0, 0)
    w.flip(slot, 256)  # the end mark
    with pytest.raises(DataError, match="torn"):
        seal.seal(job, draft)
    assert not os.path.exists(paths.manifest(job, 3, 0))
    w.flip(slot, 256)
    w.flip(slot, 0)
    assert fault(job, draft) == "torn"


def test_swapped(job):
    """Bytes of another rank or iteration in the place of this one's."""
    shutil.copy(paths.slot(job, 1, 0), paths.slot(job, 0, 0))
    assert fault(job, manifest(job)) == "swapped"
    one = manifest(job, 2)
    same = manifest(job, 2, 1)
    assert fault(job, dataclasses.replace(same, rank=0)) == "swapped"
    for change in ({"iteration": 9}, {"run_id": "other"}, {"job_id": 99}, {"attempt": 5}, {"world_size": 3}):
        assert fault(job, dataclasses.replace(one, **change)) == "swapped", change
    for slot in ("../../etc/passwd", "/etc/passwd", "x"):
        assert fault(job, dataclasses.replace(one, slot=slot)) == "swapped"


def test_iterations_exchanged(job):
    first, second = paths.slot(job, 0, 0), paths.slot(job, 0, 1)
    os.rename(first, f"{first}.x"), os.rename(second, first), os.rename(f"{first}.x", second)
    assert fault(job, manifest(job, 1)) == "stale"
    assert fault(job, manifest(job, 2)) == "stale"


def test_renamed_manifests(job):
    catalog = LocalCatalog(job, run_id="r1")
    assert catalog.load(1, 0) == manifest(job)
    os.rename(paths.manifest(job, 1, 0), paths.manifest(job, 5, 0))
    with pytest.raises(DataError, match="renamed") as caught:
        catalog.load(5, 0)
    assert caught.value.context["fault"] == "renamed"
    with pytest.raises(DataError, match="of run r1") as caught:
        LocalCatalog(job, run_id="other").load(1, 1)
    assert caught.value.context["fault"] == "swapped"


def test_a_torn_or_edited_manifest(job):
    path = paths.manifest(job, 1, 0)
    data = Path(path).read_bytes()
    for bad in (data[: len(data) // 2], b"", data.replace(b'"iteration":1', b'"iteration":3'), b"{}", b"[1]"):
        with open(path, "wb") as file:
            file.write(bad)
        with pytest.raises(DataError):
            ShardManifest.load(path)


def test_a_slot_written_while_it_is_hashed_is_not_sealed(job, monkeypatch):
    arena = Arena(job, 0, slots=2)
    draft = arena.write(0, flatten(STATE), iteration=3, run=w.run_info(world_size=2), node="n")
    hashes = contents.hashes

    def slow(data, items):
        found = hashes(data, items)
        arena.write(0, flatten(STATE), iteration=4, run=w.run_info(world_size=2), node="n")
        return found

    monkeypatch.setattr(contents, "hashes", slow)
    with pytest.raises(DataError, match="stale"):
        seal.seal(job, draft)
    assert not os.path.exists(paths.manifest(job, 3, 0))


def test_a_slot_laid_out_anew_while_it_is_hashed_is_not_sealed(job, monkeypatch):
    arena = Arena(job, 0, slots=2)
    draft = arena.write(0, flatten(STATE), iteration=3, run=w.run_info(world_size=2), node="n")
    hashes = contents.hashes

    def slow(data, items):
        found = hashes(data, items)
        arena.write(0, flatten({"c": torch.ones(3)}), iteration=4, run=w.run_info(world_size=2), node="n")
        return found

    monkeypatch.setattr(contents, "hashes", slow)
    with pytest.raises(DataError, match="stale"):
        seal.seal(job, draft)
    assert not os.path.exists(paths.manifest(job, 3, 0))


def test_the_agents_side_imports_no_torch():
    code = "import sys, slurm_resil.ckpt.seal, slurm_resil.catalog; print({'torch', 'h5py'} & set(sys.modules))"
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout == "set()\n"


def test_drained_files(tmp_path, job):
    run = str(tmp_path / "r1")
    stored = w.drain(job, run)
    seal.verify_drained(run, stored)
    path = os.path.join(run, stored.file)
    item = next(item for item in stored.items if item.name == "a")
    w.flip(path, item.offset + 17)
    with pytest.raises(DataError, match="do not match their hash") as caught:
        seal.verify_drained(run, stored)
    assert "a" in str(caught.value)
    w.flip(path, item.offset + 17)
    os.truncate(path, stored.file_bytes - 1)
    with pytest.raises(DataError, match="truncated"):
        seal.verify_drained(run, stored)
    os.unlink(path)
    with pytest.raises(DataError, match="missing"):
        seal.verify_drained(run, stored)


@pytest.mark.parametrize("value", [b"1e999", b"-1e999", b"NaN", b"Infinity"])
def test_a_number_that_no_manifest_has_is_damage(tmp_path, value):
    job = w.job(tmp_path)
    w.save_new(job, {"a": torch.ones(3)})
    path = paths.manifest(job, 1, 0)
    data = Path(path).read_bytes()
    created = data.partition(b'"created_s":')[2].partition(b",")[0]
    Path(path).write_bytes(data.replace(created, value, 1))
    with pytest.raises(DataError, match="own hash"):
        ShardManifest.load(path)


def test_a_manifest_is_the_same_however_it_is_laid_out(tmp_path):
    job = w.job(tmp_path)
    saved = w.save_new(job, {"a": torch.ones(3), "é": "\u2028"})
    path = Path(paths.manifest(job, 1, 0))
    body = json.loads(path.read_bytes())
    path.write_text(json.dumps(body, indent=1))
    assert ShardManifest.load(str(path)) == saved
    for odd in ("0" * 32, "\ud800", 7, None):
        path.write_text(json.dumps({**body, "check": odd}))
        with pytest.raises(DataError, match="own hash"):
            ShardManifest.load(str(path))


def test_helpers_verify_and_copy_the_same_and_find_the_same(job, tmp_path):
    """Large tensors in parts, many small ones together, one that is not contiguous, one byte that is wrong."""
    helpers = [Background("helper"), Background("helper")]
    big = torch.randn(24 << 20, generator=torch.Generator().manual_seed(1))
    state = {"big": big, "t": torch.randn(300, 200).t(), "small": [torch.full((7,), float(one)) for one in range(500)]}
    (tmp_path / "other").mkdir()
    other = w.job(tmp_path / "other")
    one = w.save_new(other, state)
    into = {"big": torch.zeros_like(big), "t": torch.zeros(300, 200).t(), "small": [torch.zeros(7) for _ in range(500)]}
    try:
        restore_local(into, other, one, helpers=helpers)
        assert w.bits(into) == w.bits(state)
        (item,) = [item for item in one.items if item.name == "big"]
        w.flip(paths.slot(other, 0, 0), item.offset + item.nbytes - 1)
        before = w.bits(into)
        with pytest.raises(DataError, match="of big do not match"):
            restore_local(into, other, one, helpers=helpers)
        assert w.bits(into) == before
    finally:
        for helper in helpers:
            helper.close()
