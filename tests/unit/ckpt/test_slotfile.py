"""Slot files: whose layout is taken over, and whose is not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import ckptworld as w
import h5py
import numpy as np
import pytest
import torch

from slurm_resil.ckpt import seal, slotfile
from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.slotfile import SlotFiles, Wanted, check_capacity
from slurm_resil.ckpt.snapshot import Arena
from slurm_resil.core import paths
from slurm_resil.core.errors import EXIT_CONFIG, CapacityError, DataError, SpaceError
from slurm_resil.format import container

pytestmark = pytest.mark.torch


def a_layout(rank: int = 0, count: int = 50) -> Wanted:
    specs = [container.Spec(path=f"/state/t{n}", dtype="torch.float32", shape=(n,)) for n in range(count)]
    odd = container.Spec(path="/state/ü ~2F", dtype="torch.bfloat16", shape=(), attributes={"global_shape": [3, 4]})
    return Wanted(rank=rank, specs=(*specs, odd))


@pytest.fixture
def job(tmp_path: Path) -> str:
    return w.job(tmp_path)


def inode(files: SlotFiles, index: int) -> int:
    return os.stat(files.path(index)).st_ino


def opened(files: SlotFiles, index: int, wanted: Wanted) -> slotfile.Laid:
    laid, map_ = files.open(index, wanted)
    assert len(map_) == laid.file_bytes == os.stat(files.path(index)).st_size
    assert os.stat(files.path(index)).st_blocks * 512 >= laid.file_bytes
    map_.close()
    return laid


def test_a_layout_goes_to_the_agent_and_comes_back(job):
    wanted = a_layout()
    wanted.publish(job)
    assert Wanted.read(job, 0) == wanted
    assert Wanted.read(job, 0).digest == wanted.digest
    with pytest.raises(DataError, match=r"wanted-3\.json is no layout of slots"):
        Wanted.read(job, 3)
    for text in (b"[]", b'{"rank":0}', b'{"rank":0,"specs":[[1]]}'):
        Path(paths.described(job, "wanted-0")).write_bytes(text)
        with pytest.raises(DataError, match="is no layout of slots"):
            Wanted.read(job, 0)


def test_a_later_process_takes_a_slot_over(job):
    wanted = a_layout()
    laid = opened(SlotFiles(job, 0, 3), 0, wanted)
    again = SlotFiles(job, 0, 3)
    before = inode(again, 0)
    assert again.fits(0, a_layout()) and not again.fits(1, a_layout())
    assert opened(again, 0, a_layout()) == laid
    assert inode(again, 0) == before
    assert not again.fits(0, a_layout(count=49))
    with open(again.path(0), "rb"):  # its inode is not given again
        opened(again, 0, a_layout(count=49))
        assert inode(again, 0) != before


def test_slots_like_another_are_the_same_file(job, monkeypatch):
    files, wanted = SlotFiles(job, 0, 3), a_layout()
    first = opened(files, 0, wanted)
    fresh = opened(SlotFiles(job, 1, 3), 0, a_layout(rank=1))
    monkeypatch.setattr(container, "create_skeleton", lambda *_, **__: pytest.fail("HDF5 was asked"))
    assert opened(files, 1, wanted) == first
    assert fresh.offsets == first.offsets
    assert Path(files.path(0)).read_bytes() == Path(files.path(1)).read_bytes()
    with h5py.File(files.path(1), "r") as file:
        assert sorted(file["state"])[:2] == ["t0", "t1"]
        assert file["state/t7"].shape == (7,)


@pytest.mark.parametrize(
    "damage", ["a header", "the superblock", "truncated", "a hole", "grown", "gone", "no layout", "another's layout"]
)
def test_a_damaged_slot_is_laid_out_anew(job, damage):
    files, wanted = SlotFiles(job, 0, 2), a_layout()
    laid = opened(files, 0, wanted)
    path, beside = Path(files.path(0)), Path(paths.described(job, "layout-0-0.h5"))
    data = bytearray(path.read_bytes())
    at = {"a header": data.index(b"OHDR"), "the superblock": 4096 + 9}.get(damage)
    if at is not None:
        data[at] ^= 4
        path.write_bytes(data)
    elif damage == "truncated":
        os.truncate(path, laid.file_bytes - 1)
    elif damage == "grown":
        os.truncate(path, laid.file_bytes + 1)
    elif damage == "a hole":
        path.unlink()
        with path.open("wb") as file:
            file.truncate(laid.file_bytes)
    elif damage == "gone":
        path.unlink()
    elif damage == "no layout":
        beside.write_bytes(beside.read_bytes()[:-9])
    else:
        other = opened(SlotFiles(job, 1, 2), 0, a_layout(rank=1, count=49))
        assert other.wanted != laid.wanted
        beside.write_bytes(Path(paths.described(job, "layout-1-0.h5")).read_bytes())
    again = opened(files, 0, wanted)
    assert (again.offsets, again.file_bytes) == (laid.offsets, laid.file_bytes)  # HDF5 notes the time, too
    with h5py.File(path, "r") as file:
        assert len(file["state"]) == 51
    assert opened(files, 1, wanted) == again


def test_one_that_is_damaged_is_nobodys_model(job):
    files, wanted = SlotFiles(job, 0, 2), a_layout()
    opened(files, 0, wanted)
    data = bytearray(Path(files.path(0)).read_bytes())
    data[data.index(b"OHDR")] ^= 4
    Path(files.path(0)).write_bytes(data)
    opened(files, 1, wanted)
    with h5py.File(files.path(1), "r") as file:
        assert len(file["state"]) == 51


def test_no_link_is_followed(job, tmp_path):
    files, wanted = SlotFiles(job, 0, 2), a_layout()
    laid = opened(files, 0, wanted)
    precious = tmp_path / "precious"
    precious.write_bytes(Path(files.path(0)).read_bytes())
    before = precious.read_bytes()
    os.unlink(files.path(0))
    os.symlink(precious, files.path(0))
    os.symlink(precious, f"{files.path(1)}.tmp")
    for index in (0, 1):
        assert opened(files, index, wanted).offsets == laid.offsets
        assert not os.path.islink(files.path(index))
    assert precious.read_bytes() == before


def test_a_state_goes_into_slots_that_others_have_laid_out(job):
    """The agent, or the process before; and the rank sees when they are laid out anew under its hands."""
    state = {"a": torch.arange(1000.0), "n": np.arange(7), "b": torch.tensor(True)}
    flat = flatten(state)
    Arena(job, 0, slots=2).wanted(flat).publish(job)
    files, wanted = SlotFiles(job, 0, 2), Wanted.read(job, 0)
    for index in (0, 1):
        files.create(index, wanted)[1].close()
    inodes = [inode(files, index) for index in (0, 1)]
    arena = Arena(job, 0, slots=2)
    for iteration in (1, 2, 3):
        w.save(arena, job, state, index=iteration % 2, iteration=iteration)
    assert [inode(files, index) for index in (0, 1)] == inodes
    files.create(0, wanted)[1].close()
    seal.verify(job, w.save(arena, job, state, index=0, iteration=4))
    into = {"a": torch.zeros(1000), "n": np.zeros(7, int), "b": torch.tensor(False)}
    w.load(job, into, iteration=4)
    assert w.bits(into) == w.bits(state)


def test_a_burst_buffer_that_could_never_hold_it(job):
    assert check_capacity(job, a_layout(), 8, slots=4, parity_bytes=100, scheme="xor") == ""
    size = os.statvfs(os.path.dirname(job))
    huge = Wanted(
        rank=0, specs=(container.Spec(path="/a", dtype="bytes", shape=(size.f_blocks * size.f_frsize // 8,)),)
    )
    assert check_capacity(job, huge, 1, slots=4) == ""
    words = r"is too small: it holds \d+ bytes, \d+ are needed for 2 slots of 8 ranks"
    with pytest.raises(CapacityError, match=words) as caught:
        check_capacity(job, huge, 8, slots=2)
    assert caught.value.exit_code == EXIT_CONFIG  # `run` does not start it again


def test_what_parity_takes_is_counted_and_told(job):
    """Slots of a tenth of what there is: parity of 3 more does not fit beside 8, and one of 9 not beside 2."""
    info = os.statvfs(os.path.dirname(job))
    size = info.f_blocks * info.f_frsize
    tenth = Wanted(rank=0, specs=(container.Spec(path="/a", dtype="bytes", shape=(size // 10 - 8192,)),))
    slot = tenth.file_bytes
    assert check_capacity(job, tenth, 2, slots=4, parity_bytes=size // 20, scheme="xor") == ""
    words = check_capacity(job, tenth, 2, slots=4, parity_bytes=3 * size // 10, scheme="xor in sets of 4 nodes")
    assert f"holds {size} bytes, {8 * slot + 3 * size // 10} are needed for 4 slots of 2 ranks" in words
    assert f"{3 * size // 10} of these for the parity of xor in sets of 4 nodes; 3 slots are made" in words
    words = check_capacity(job, tenth, 2, slots=4, parity_bytes=9 * size // 10, scheme="xor")
    assert f"checkpoints are not protected: 2 slots leave {size - 4 * slot} bytes" in words


def test_parity_goes_before_slots_that_are_only_a_help(job):
    info = os.statvfs(os.path.dirname(job))
    free = info.f_bavail * info.f_frsize
    files = SlotFiles(job, 0, 4)
    wanted = replace(a_layout(), reserve_bytes=4 * free)  # on no account is there so much
    for index in (0, 1):
        files.create(index, wanted)[1].close()
    with pytest.raises(SpaceError, match=r"with [0-9]+ for parity; .* the next saves use the 2 slots that are there"):
        files.create(2, wanted)
    wanted.publish(job)
    assert Wanted.read(job, 0) == wanted and wanted.digest == a_layout().digest
    held = os.path.join(job, "redundancy")
    os.makedirs(held)
    Path(held, "1.bin").write_bytes(bytes(1 << 20))  # of what is kept for it, this is there
    files.create(2, replace(wanted, reserve_bytes=1 << 20))[1].close()
