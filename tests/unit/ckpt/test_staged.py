"""Ranks read a staged copy of a drained file, and the file for what is missing or damaged there."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

import ckptworld as w
import numpy as np
import pytest
import torch

from slurm_resil.comm import local
from slurm_resil.core import paths
from slurm_resil.core.errors import DataError
from slurm_resil.drain import collective, publishing
from slurm_resil.drain.fetch import ALL, fetch
from slurm_resil.format import staged
from slurm_resil.format.manifest import DrainedManifest
from slurm_resil.format.staged import StagedManifest

pytestmark = pytest.mark.torch

WHOLE = torch.arange(5 << 14, dtype=torch.int32)
BLOCK = 64 << 10  # five of them and some


@pytest.fixture
def run(tmp_path, monkeypatch) -> str:
    """Directory of a run with a drained file."""
    for module in (collective, publishing):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    w.save_new(job, {"a": WHOLE, "b": torch.ones(7)})
    w.drain(job, run)
    return run


@pytest.fixture
def fetched(tmp_path, run) -> str:
    """A node's directory with a staged copy of it."""
    node = str(tmp_path / "node" / "job-7")
    os.makedirs(os.path.dirname(node))
    local.run(1, lambda comm: fetch(comm, run_dir=run, job_dir=node, iteration=None, env={}, what=ALL))
    return node


def manifest_of(run: str) -> DrainedManifest:
    return DrainedManifest.load(paths.drained_manifest(run, 1))


def load(run: str, node: str):
    state = {"a": torch.zeros_like(WHOLE), "b": torch.zeros(7)}
    found = staged.find(node, manifest_of(run))
    restored = w.load_drained(run, state, 0, 1, staged=found)
    assert torch.equal(state["a"], WHOLE) and torch.equal(state["b"], torch.ones(7))
    if found is not None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(found._fd)
    return restored


def test_all_bytes_come_from_the_copy(run, fetched):
    restored = load(run, fetched)
    assert restored.staged_bytes == restored.read_bytes > WHOLE.nbytes


@pytest.mark.parametrize("world", [2, 3])
def test_another_number_of_ranks(run, fetched, world):
    for rank in range(world):
        state = {"a": torch.zeros_like(WHOLE), "b": torch.zeros(7)}
        restored = w.load_drained(run, state, rank, world, staged=staged.find(fetched, manifest_of(run)))
        assert torch.equal(state["a"], WHOLE) and torch.equal(state["b"], torch.ones(7))
        assert restored.staged_bytes == restored.read_bytes


def test_the_file_is_not_touched_where_the_copy_will_do(run, fetched):
    """Damage that is only in the file is not met."""
    w.flip(paths.drained(run, 1), manifest_of(run).block_bytes + 7)
    load(run, fetched)


def test_blocks_that_are_not_staged_come_from_the_file(run, fetched):
    manifest = manifest_of(run)
    there = np.zeros(len(manifest.blocks), np.bool_)
    there[1:3] = True
    StagedManifest.of(manifest, there, created_s=0.0).publish(paths.staged_manifest(fetched, 1), sync=False)
    assert load(run, fetched).staged_bytes == 2 * manifest.block_bytes


def test_a_damaged_block_of_the_copy_is_read_from_the_file(run, fetched, caplog):
    size = manifest_of(run).block_bytes
    w.flip(paths.staged(fetched, 1), 2 * size + 9)
    with caplog.at_level(logging.WARNING):
        restored = load(run, fetched)
    assert restored.read_bytes - restored.staged_bytes == size
    (record,) = caplog.records
    assert "do not match their hash; they are read from" in record.getMessage() and run in record.getMessage()


def test_what_is_damaged_in_both_is_refused(run, fetched):
    for path in (paths.staged(fetched, 1), paths.drained(run, 1)):
        w.flip(path, 9 + manifest_of(run).block_bytes)
    with pytest.raises(DataError, match="do not match their hash"):
        load(run, fetched)


@pytest.mark.parametrize("how", ["cut", "no copy", "no manifest", "torn manifest", "another file", "link"])
def test_a_copy_that_is_none_is_passed_over(run, fetched, how, tmp_path):
    copy, manifest = paths.staged(fetched, 1), paths.staged_manifest(fetched, 1)
    if how == "cut":
        os.truncate(copy, 100)
    elif how == "torn manifest":
        os.truncate(manifest, 50)
    elif how == "link":
        os.rename(copy, tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", copy)
    elif how == "another file":
        text = StagedManifest.load(manifest)
        StagedManifest(**{**vars(text), "contents": "0" * 32}).publish(manifest, sync=False)
    else:
        os.unlink(copy if how == "no copy" else manifest)
    assert staged.find(fetched, manifest_of(run)) is None
    assert load(run, fetched).staged_bytes == 0


def test_a_copy_that_is_cut_while_it_is_read(run, fetched):
    found = staged.find(fetched, manifest_of(run))
    assert found is not None
    os.truncate(found.path, manifest_of(run).block_bytes)
    state = {"a": torch.zeros_like(WHOLE), "b": torch.zeros(7)}
    restored = w.load_drained(run, state, 0, 1, staged=found)
    assert torch.equal(state["a"], WHOLE)
    assert restored.staged_bytes == manifest_of(run).block_bytes


class Hands:
    """A clock of which a test hears."""

    def __init__(self, then=lambda: None) -> None:
        self.at, self.then = 0.0, then

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds
        self.then()


def test_a_fetch_at_work_is_waited_for_as_long_as_it_gets_on(run, fetched):
    path = Path(paths.staged(fetched, 1))
    assert staged.wait(fetched, 1) < 1.0  # nobody is at it
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        still = Hands()
        assert staged.STILL_S <= staged.wait(fetched, 1, clock=still) < staged.STILL_S + 1
        ticks = iter(range(10**9))
        at_work = Hands(lambda: os.utime(path, ns=(0, next(ticks))))
        assert staged.LONGEST_S <= staged.wait(fetched, 1, clock=at_work) < staged.LONGEST_S + 1
        ends = Hands(lambda: fcntl.flock(file, fcntl.LOCK_UN) if ends.at > 3 else None)
        assert 3 < staged.wait(fetched, 1, clock=ends) < 4


def test_a_fetch_that_was_killed_is_not_waited_for(run, fetched):
    pid = os.fork()
    if pid == 0:
        file = os.open(paths.staged(fetched, 1), os.O_RDWR)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert staged.wait(fetched, 1) < 1.0


def test_clearing(run, fetched):
    staged.clear(fetched, keep=lambda iteration: iteration == 1)
    assert len(os.listdir(paths.fetched(fetched))) == 2
    staged.clear(fetched)
    assert os.listdir(paths.fetched(fetched)) == []
    os.rmdir(paths.fetched(fetched))
    staged.clear(fetched)
