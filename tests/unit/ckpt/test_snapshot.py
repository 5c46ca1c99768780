"""The arena: layouts, space, memory; storage that refuses."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import ckptworld as w
import h5py
import numpy as np
import pytest
import torch

from slurm_resil.ckpt import seal
from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.snapshot import Arena
from slurm_resil.core import paths
from slurm_resil.core.errors import ConfigError, SpaceError
from slurm_resil.format import container
from slurm_resil.format.manifest import ShardManifest

pytestmark = pytest.mark.torch

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems: needs root")


@contextlib.contextmanager
def tmpfs(path: str, options: str) -> Iterator[str]:
    os.makedirs(path)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path]).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_slot_is_hdf5_that_anyone_reads(tmp_path):
    job = w.job(tmp_path)
    state = {"model": torch.nn.Linear(3, 2), "x": {"é/ü": np.arange(4, dtype=">i2")}, "half": torch.ones(2).bfloat16()}
    w.save_new(job, state)
    with h5py.File(paths.slot(job, 0, 0), "r") as file:
        assert np.array_equal(file["state/model/weight"][...], state["model"].weight.detach().numpy())
        assert file["state/x/é%2Fü"][...].tolist() == [0, 1, 2, 3]
        assert file["state/half"][...].tolist() == [1, 1]
        assert file["state/half"].attrs["dtype"] == b'"torch.bfloat16"'
    attributes, found = container.read_index(paths.slot(job, 0, 0))
    assert attributes["format"] == "slurm_resil slot"
    items = {f"/state/{item.name}": (item.offset, item.dtype, item.shape) for item in w.save_new(job, state).items}
    assert {entry.path: (entry.offset, entry.dtype, entry.shape) for entry in found} == items


def test_slots_are_laid_out_again_only_when_the_layout_changes(tmp_path):
    job = w.job(tmp_path)
    arena = Arena(job, 0, slots=2)
    state = w.training(1, 0)
    path = paths.slot(job, 0, 0)
    w.save(arena, job, state)
    with open(path, "rb") as file:  # held open, so that the number of its inode is not given again
        w.train(state, 1)  # the optimizer's state is new
        manifest = w.save(arena, job, state, iteration=2)
        assert os.stat(path).st_ino != os.fstat(file.fileno()).st_ino
    assert "optimizer/state/model/middle.weight/exp_avg" in {item.name for item in manifest.items}
    second = os.stat(path).st_ino
    for iteration in (3, 4):
        w.train(state, 1)
        w.save(arena, job, state, iteration=iteration)
        assert os.stat(path).st_ino == second
    other = w.training(2)
    w.load(job, other, iteration=4)
    assert w.bits(other) == w.bits(state)
    assert os.listdir(os.path.dirname(path)) == ["0-0.h5"]
    os.unlink(path)  # somebody cleaned up
    w.save(arena, job, state, iteration=5)
    w.load(job, other, iteration=5)


def test_prepare_makes_the_first_save_as_cheap_as_the_others(tmp_path):
    job = w.job(tmp_path)
    arena = Arena(job, 3, slots=3)
    flat = flatten({"a": torch.ones(1000)})
    arena.prepare(flat)
    inodes = [os.stat(paths.slot(job, 3, index)).st_ino for index in range(3)]
    for index in range(3):
        arena.write(index, flat, iteration=index + 1, run=w.run_info(), node="n")
    assert [os.stat(paths.slot(job, 3, index)).st_ino for index in range(3)] == inodes


def test_every_page_of_a_slot_is_there_before_the_copy(tmp_path):
    job = w.job(tmp_path)
    w.save_new(job, {"a": torch.ones(1 << 20), "b": torch.ones(3)})
    info = os.stat(paths.slot(job, 0, 0))
    assert info.st_blocks * 512 >= info.st_size
    assert info.st_mode & 0o777 == 0o600


def test_a_wrong_slot_number(tmp_path):
    with pytest.raises(IndexError):
        Arena(w.job(tmp_path), 0, slots=2).write(2, flatten({}), iteration=1, run=w.run_info(), node="n")


def test_an_empty_state(tmp_path):
    job = w.job(tmp_path)
    assert w.save_new(job, {}).items == ()
    w.load(job, {})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("registered", [True, False])
def test_cuda(tmp_path, registered, monkeypatch):
    job = w.job(tmp_path)
    arena = Arena(job, 0, slots=2)
    if not registered:
        monkeypatch.setattr(arena._registered, "add", lambda _: None)
    big = torch.rand(40 << 20, device="cuda")
    state = {"a": big.clone(), "t": big[:999].reshape(3, 333).t(), "h": big[:5].bfloat16(), "c": torch.ones(3)}
    want = w.bits(state)
    for iteration in (1, 2, 3):
        state["a"].mul_(1)  # queued work that the copy must come after
        draft = arena.write(0, flatten(state), iteration=iteration, run=w.run_info(), node="n")
        for tensor in state.values():
            tensor.zero_()
        seal.seal(job, draft)
        w.load(job, state, iteration=iteration)
        assert w.bits(state) == want
    arena.close()


# -- storage that refuses


def still_whole(job: str, iterations: list[int], state: dict) -> None:
    for iteration in iterations:
        seal.verify(job, ShardManifest.load(paths.manifest(job, iteration, 0)))
        other = {key: torch.zeros_like(value) for key, value in state.items()}
        w.load(job, other, iteration=iteration)
        assert w.bits(other) == w.bits(state)


@needs_root
def test_a_burst_buffer_that_is_too_small(tmp_path):
    """S9: said before anything is written, with both sizes."""
    with tmpfs(str(tmp_path / "bb"), "size=16m") as root:
        job = f"{root}/job-7"
        small = {"a": torch.arange(1000.0)}
        arena = Arena(job, 0, slots=3)
        w.save(arena, job, small, index=0, iteration=1)
        large = {"a": torch.ones(8 << 20, dtype=torch.uint8)}
        before = w.bits(large)
        with pytest.raises(SpaceError, match=r"the burst buffer at .* has \d+ bytes .* \d+ are needed") as caught:
            w.save(arena, job, large, index=1, iteration=2)
        text = str(caught.value)
        assert root in text and str(8 << 20) in text and "2 slots" in text
        assert w.bits(large) == before
        assert sorted(os.listdir(f"{job}/manifests")) == ["0000000001-000000.json"]
        assert os.listdir(f"{job}/slots") == ["0-0.h5"]
        still_whole(job, [1], small)
        w.save(arena, job, small, index=1, iteration=2)  # and it goes on
        still_whole(job, [1, 2], small)


@needs_root
def test_a_burst_buffer_that_fills_up_meanwhile(tmp_path):
    """The space that the pre-flight saw is gone when the slot is laid out: an error, no SIGBUS."""
    with tmpfs(str(tmp_path / "bb"), "size=16m") as root:
        job = f"{root}/job-7"
        state = {"a": torch.arange(1 << 18).float()}  # 1 MiB, three slots
        arena = Arena(job, 0, slots=3)
        w.save(arena, job, state, index=0, iteration=1)
        w.save(arena, job, state, index=1, iteration=2)
        info = os.statvfs(root)
        with open(f"{root}/other", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, (info.f_bavail - 8) * info.f_frsize)
        check, arena._files._check_space = arena._files._check_space, lambda *_: None
        with pytest.raises(SpaceError, match="bytes for rank 0"):
            w.save(arena, job, state, index=2, iteration=3)
        arena._files._check_space = check
        with pytest.raises(SpaceError, match=r"free space there, .* the next saves use the 2 slots that are there"):
            w.save(arena, job, state, index=2, iteration=3)
        still_whole(job, [1, 2], state)
        assert sorted(os.listdir(f"{job}/slots")) == ["0-0.h5", "0-1.h5"]
        w.save(arena, job, state, index=0, iteration=3)  # a slot that is there needs nothing new
        os.unlink(f"{root}/other")
        w.save(arena, job, state, index=2, iteration=4)
        still_whole(job, [2, 3, 4], state)


@needs_root
def test_two_slots_that_are_there_are_enough_after_a_restart(tmp_path):
    """A third one does not fit: neither for the process that made the two nor for the one after it."""
    with tmpfs(str(tmp_path / "bb"), "size=3m") as root:
        job = f"{root}/job-7"
        state = {"a": torch.arange(1 << 18).float()}  # 1 MiB, three slots
        for first in (1, 3):
            arena = Arena(job, 0, slots=3)
            w.save(arena, job, state, index=0, iteration=first)
            w.save(arena, job, state, index=1, iteration=first + 1)
            with pytest.raises(SpaceError, match="2 slots that are there"):
                w.save(arena, job, state, index=2, iteration=9)
            still_whole(job, [first, first + 1], state)
            arena.close()


@needs_root
@pytest.mark.parametrize("inodes", [3, 4, 5])
def test_a_burst_buffer_without_inodes(tmp_path, inodes):
    with tmpfs(str(tmp_path / "bb"), f"size=16m,nr_inodes={inodes}") as root:
        arena = Arena(f"{root}/job-7", 0, slots=2)
        with pytest.raises((SpaceError, OSError), match=r"No space|bytes for rank 0"):
            for index in range(4):
                w.save(arena, f"{root}/job-7", {"a": torch.ones(3)}, index=index % 2, iteration=index + 1)


@needs_root
def test_a_read_only_burst_buffer(tmp_path):
    with tmpfs(str(tmp_path / "bb"), "size=16m") as root:
        job = f"{root}/job-7"
        state = {"a": torch.arange(10)}
        w.save_new(job, state)
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        with pytest.raises(SpaceError, match="read-only") as caught:
            w.save_new(job, {"b": torch.arange(20)}, index=1, iteration=2)
        assert root in str(caught.value)
        still_whole(job, [1], state)


def test_no_burst_buffer(tmp_path):
    with pytest.raises(ConfigError, match="does not exist") as caught:
        w.save_new(str(tmp_path / "none" / "job-7"), {"a": torch.ones(1)})
    assert caught.value.exit_code == 78
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="burst buffer"):
        w.save_new(str(tmp_path / "file" / "job-7"), {"a": torch.ones(1)})
