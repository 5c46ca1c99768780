"""Rows S* of the cases from the field that the checkpoint's own part decides; each test names its row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import ckptworld as w
import pytest
import torch

from slurm_resil.catalog import LocalCatalog, RunCatalog
from slurm_resil.ckpt import seal
from slurm_resil.ckpt.device import CudaRuntime, Registered
from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.snapshot import Arena
from slurm_resil.core import paths
from slurm_resil.core.errors import DataError, SpaceError, StateError
from slurm_resil.core.retention import Retention
from slurm_resil.launch.retain import Pruner

pytestmark = pytest.mark.torch


def script(name: str, *argv: str) -> dict:
    """Run a helper in a process of its own; returns the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / name), *argv],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("seed", [1, 2])
def test_s2_s3_s12_killed_at_any_moment(tmp_path, seed):
    """A writer that is killed leaves the old checkpoint or the new one, never a mix, and the next one can save."""
    report = script("kill_saver.py", str(tmp_path), str(seed), "30")
    assert report["saved"] >= 10
    assert report["files"] <= 4


def test_s10_memory_is_flat_over_200_saves(tmp_path):
    """Neither the process nor its mappings and descriptors nor the directory grow."""
    where = "/dev/shm" if os.path.isdir("/dev/shm") else tmp_path
    with tempfile.TemporaryDirectory(dir=where) as directory:
        report = script("flat_memory.py", directory)
    start, end = report["start"], report["end"]
    assert end["rss"] - start["rss"] < report["nbytes"] // 2
    assert {**end, "rss": 0} == {**start, "rss": 0}
    assert end["files"] == report["manifests"] == 3


def test_s4_every_tensor_is_overwritten_right_after_the_write(tmp_path):
    job = w.job(tmp_path)
    state = w.training(1, 2)
    want = w.bits(state)
    draft = Arena(job, 0).write(0, flatten(state), iteration=1, run=w.run_info(), node="n")
    w.scramble(state)
    state["generator"].manual_seed(99)
    seal.seal(job, draft)
    other = w.training(2)
    w.load(job, other)
    assert w.bits(other) == want


def test_s5_tensors_that_were_reallocated_are_saved_anew(tmp_path):
    job = w.job(tmp_path)
    arena = Arena(job, 0, slots=2)
    state = {"m": torch.nn.Linear(4, 4), "t": torch.zeros(5), "d": {"x": torch.zeros(3)}}
    for iteration in range(1, 6):
        state["m"].weight = torch.nn.Parameter(torch.full((4, 4), float(iteration)))
        state["m"].bias.data = torch.full((4,), float(iteration))
        state["t"] = torch.full((5,), float(iteration))
        state["d"]["x"] = torch.full((3,), float(iteration))
        w.save(arena, job, state, index=iteration % 2, iteration=iteration)
        other = {"m": torch.nn.Linear(4, 4), "t": torch.zeros(5), "d": {"x": torch.zeros(3)}}
        w.load(job, other, iteration=iteration)
        assert w.bits(other) == w.bits(state)


def test_s6_what_appears_later_is_saved(tmp_path):
    job = w.job(tmp_path)
    arena = Arena(job, 0, slots=2)
    state = w.training(1, 0)
    first = w.save(arena, job, state, index=0, iteration=1)
    w.train(state, 1)
    second = w.save(arena, job, state, index=1, iteration=2)
    assert len(second.items) > len(first.items)
    state["model"].register_buffer("late", torch.full((3,), 4.0))
    w.save(arena, job, state, index=0, iteration=3)
    other = w.training(2)
    other["model"].register_buffer("late", torch.zeros(3))
    w.load(job, other, iteration=3)
    assert w.bits(other) == w.bits(state)
    other = w.training(2)
    w.load(job, other, iteration=2)


def test_s7_storage_that_refuses_in_the_middle(tmp_path, monkeypatch):
    """The allocation is refused half way: an error, no manifest, and what was sealed stays."""
    job = w.job(tmp_path)
    arena = Arena(job, 0, slots=2)
    state = {"a": torch.ones(1000)}
    w.save(arena, job, state, index=0, iteration=1)
    real = os.posix_fallocate

    def refuse(fd: int, offset: int, length: int) -> None:
        real(fd, offset, length // 2)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SpaceError, match=r"\d+ bytes .* \d+ are needed") as caught:
        w.save(arena, job, state, index=1, iteration=2)
    assert job in str(caught.value)
    assert list(LocalCatalog(job).sealed()) == [1]
    assert os.listdir(f"{job}/slots") == ["0-0.h5"]
    monkeypatch.undo()
    w.save(arena, job, state, index=1, iteration=2)
    assert sorted(LocalCatalog(job).sealed()) == [1, 2]


def test_s9_a_burst_buffer_that_is_too_small_is_found_before(tmp_path, monkeypatch):
    """By its size alone; the same on a real tmpfs is in tests/unit/ckpt/test_snapshot.py."""
    real = os.statvfs

    def small(path: str) -> os.statvfs_result:
        fields = list(real(path))
        fields[0:5] = [4096, 4096, 100, 100, 100]
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", small)
    job = w.job(tmp_path)
    with pytest.raises(SpaceError, match=f"has {100 * 4096} bytes") as caught:
        w.save_new(job, {"a": torch.ones(1 << 20)})
    assert str(4 << 20) in str(caught.value)
    assert os.listdir(f"{job}/slots") == []


def test_s12_what_a_crash_left_does_not_hinder_the_same_iteration(tmp_path):
    job = w.job(tmp_path)
    state = {"a": torch.arange(10)}
    w.save_new(job, state)
    slot = paths.slot(job, 0, 0)
    for name in (f"{slot}.tmp", paths.slot(job, 0, 1)):
        Path(name).write_bytes(b"half")
    os.truncate(slot, 10)
    Path(paths.manifest(job, 1, 0)).write_bytes(b"{")
    Path(f"{job}/manifests/.0000000001-000000.json.5.tmp").write_bytes(b"half")
    for index in (0, 1):
        w.save_new(job, state, index=index)
        other = {"a": torch.zeros(10, dtype=torch.long)}
        w.load(job, other)
        assert w.bits(other) == w.bits(state)


def test_s13_a_state_that_cannot_be_saved_leaves_everything_as_it_was(tmp_path):
    job = w.job(tmp_path)
    arena = Arena(job, 0, slots=2)
    state = w.training(1, 1)
    w.save(arena, job, state)
    before = w.bits(state)
    with pytest.raises(StateError, match="bad/0"):
        w.save(arena, job, {**state, "bad": [threading.Lock()]}, index=1, iteration=2)
    assert w.bits(state) == before
    assert list(LocalCatalog(job).sealed()) == [1]
    w.train(state, 1)
    w.save(arena, job, state, index=1, iteration=2)


def test_s14_memory_is_registered_once(tmp_path, monkeypatch):
    """Against a stand-in for CUDA's runtime, which refuses what is registered already, as the real one does."""
    import mmap

    known: set[int] = set()
    calls = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 -- CUDA's name
            calls.append(address)
            known.add(address)
            return 712 if calls.count(address) > 1 else 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 -- CUDA's name
            known.remove(address)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    registered = Registered(CudaRuntime())
    maps = [mmap.mmap(-1, 4096) for _ in range(2)]
    for _ in range(5):
        for map_ in maps:
            registered.add(map_)
    assert len(calls) == 2
    for map_ in maps:
        registered.remove(map_)
        registered.remove(map_)
    assert not known


def test_s15_the_old_one_goes_only_when_the_new_one_is_durable(tmp_path):
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    arena = Arena(job, 0, slots=3)
    state = {"a": torch.ones(10)}
    drained, pruner = RunCatalog(run), Pruner(run, Retention(keep_last=1))
    for iteration in (1, 2):
        w.save(arena, job, state, index=iteration, iteration=iteration)
    w.drain(job, run, iteration=1)
    assert pruner.prune().deleted == []  # 2 is sealed here, and durable nowhere
    for name in ("ckpt-0000000002.h5", ".ckpt-0000000002.h5.part"):  # a drain of 2 that is at work
        Path(run, name).touch()
        assert pruner.prune().deleted == []
    assert drained.durable() == [1]
    w.drain(job, run, iteration=2)
    assert pruner.prune().deleted == [1]
    assert drained.durable() == [2]
    os.unlink(paths.slot(job, 0, 2))
    with pytest.raises(DataError, match="missing"):
        w.load(job, state, iteration=2)
