"""What is read back comes from storage: bytes that were changed beneath the page cache stop the publication."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from shardworld import ITERATION, World, build

from slurm_resil.comm import local
from slurm_resil.core.errors import DataError
from slurm_resil.drain import hints, storage
from slurm_resil.drain.ahead import PAGE_BYTES, buffer
from slurm_resil.drain.collective import VERIFY_CACHE

FIEMAP = 0xC020660B


@dataclass
class Disk:
    """A file system in an image file: what is written to the image is beneath the page cache of its files."""

    image: Path
    root: Path

    def corrupt(self, path: str, offset: int) -> None:
        """Flip a bit of a file in the image; the page cache of the file still has the byte that was written."""
        with open(path, "rb") as file:
            mapped = bytearray(struct.pack("=QQLLLL", offset, 1, 0, 0, 1, 0) + bytes(56))
            fcntl.ioctl(file, FIEMAP, mapped)
            assert struct.unpack_from("=L", mapped, 20)[0] == 1, "no block there"
            logical, physical, _ = struct.unpack_from("=QQQ", mapped, 32)
            at = physical + offset - logical
            fd = os.open(self.image, os.O_RDWR)
            try:
                byte = os.pread(fd, 1, at)[0]
                file.seek(offset)
                assert file.read(1)[0] == byte
                os.pwrite(fd, bytes([byte ^ 1]), at)
            finally:
                os.close(fd)
            file.seek(offset)
            assert file.read(1)[0] == byte  # still the old one: this is what a plain read would find


@pytest.fixture
def disk(tmp_path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("mounts a file system: needs root")
    image, root = tmp_path / "image", tmp_path / "disk"
    root.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    if subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "4096", image], capture_output=True).returncode:
        pytest.skip("no mkfs.ext4")
    if subprocess.run(["mount", "-o", "loop", image, root], capture_output=True).returncode:
        pytest.skip("may not mount an image here")
    try:
        yield Disk(image, root)
    finally:
        subprocess.run(["umount", root], check=True)


def after_sync(monkeypatch: pytest.MonkeyPatch, act) -> None:
    """Do something once all data was synced, before it is read back."""
    sync = local.LocalFile.sync

    def then(self):
        sync(self)
        if self._comm.rank == 0:
            act()
        self._comm.barrier()

    monkeypatch.setattr(local.LocalFile, "sync", then)


def place(world: World, name: str) -> int:
    """Where an item's first bytes lie in the unpublished file; 0 is HDF5's superblock."""
    if name == "superblock":
        return 8
    raw = Path(part(world)).read_bytes()
    tensor = world.expected[name]
    return raw.index(tensor.tobytes()) + tensor.nbytes // 2


def part(world: World) -> str:
    return f"{world.run_dir}/.ckpt-{ITERATION:010d}.h5.part"


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system without direct reads does."""
    plain = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return plain(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)


@pytest.mark.parametrize(
    "name", ["state/model/rows", "state/model/columns", "state/model/same", "ranks/1/rng/cpu", "superblock"]
)
def test_what_changes_beneath_the_page_cache_is_not_published(disk, monkeypatch, name):
    world = build(disk.root, ranks=2, scale=40)
    world.seal()
    after_sync(monkeypatch, lambda: disk.corrupt(part(world), place(world, name)))
    with pytest.raises(DataError, match=r"reads back other bytes than were written.*the shards are right"):
        world.drain()
    assert world.published() == [] and world.leftovers() == []


def test_read_through_the_cache_it_is_not_seen_and_the_outcome_says_so(disk, monkeypatch):
    world = build(disk.root, ranks=2, scale=40)
    world.seal()
    after_sync(monkeypatch, lambda: disk.corrupt(part(world), place(world, "state/model/rows")))
    outcome = world.drain(verify=VERIFY_CACHE)
    assert outcome.read_from == "not past the page cache"


def test_the_outcome_says_what_the_bytes_came_from(disk, tmp_path):
    world = build(disk.root / "a", ranks=2)
    world.seal()
    assert world.drain().read_from == "past the page cache"
    assert world.drain().read_from == ""  # durable already
    assert hints.file_system("/dev/shm") == "tmpfs"
    path = Path("/dev/shm") / f"resil-{os.getpid()}"
    path.mkdir()
    try:
        world = build(path, ranks=2)
        world.seal()
        assert world.drain().read_from == "not past the page cache"
    finally:
        subprocess.run(["rm", "-r", path], check=True)


def test_a_file_system_without_direct_reads_is_read_after_eviction(disk, monkeypatch):
    path = disk.root / "file"
    data = np.random.default_rng(0).bytes(4 * PAGE_BYTES)
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        assert storage.resident(fd, 0, len(data)) == 4 * PAGE_BYTES
        refuse_direct(monkeypatch)
        out = buffer(4 * PAGE_BYTES)
        disk.corrupt(str(path), 7)
        reader = storage.Reader(str(path))
        try:
            assert bytes(reader.read(0, PAGE_BYTES, out)) != data[:PAGE_BYTES]
            assert reader.words == storage.PAST
            assert bytes(reader.read(0, PAGE_BYTES, out)) != data[:PAGE_BYTES]
        finally:
            reader.close()
    finally:
        os.close(fd)


def test_pages_that_cannot_be_evicted_are_told(disk, monkeypatch):
    path = disk.root / "file"
    path.write_bytes(bytes(4 * PAGE_BYTES))
    refuse_direct(monkeypatch)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        os.fsync(file.fileno())
        assert mapped[PAGE_BYTES] == 0  # a page that somebody uses stays
        reader = storage.Reader(str(path))
        try:
            reader.read(2 * PAGE_BYTES, 3 * PAGE_BYTES, buffer(PAGE_BYTES))
            reader.read(0, 2 * PAGE_BYTES, buffer(2 * PAGE_BYTES))
            assert reader.words == storage.NOT_PAST
        finally:
            reader.close()


@pytest.mark.parametrize("size", [1, PAGE_BYTES - 1, PAGE_BYTES, 5 * PAGE_BYTES + 17, 8 << 20])
@pytest.mark.parametrize("past", [True, False])
def test_every_range_is_read_as_it_is(tmp_path, size, past):
    data = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    path = tmp_path / "file"
    path.write_bytes(data.tobytes())
    subprocess.run(["sync", path], check=True)
    out = buffer(-(-size // PAGE_BYTES) * PAGE_BYTES)
    reader = storage.Reader(str(path), past=past)
    try:
        for begin in range(0, size, max(PAGE_BYTES, size // 3 // PAGE_BYTES * PAGE_BYTES)):
            for end in {begin + 1, min(begin + PAGE_BYTES + 3, size), size}:
                assert np.array_equal(reader.read(begin, end, out), data[begin:end])
        with pytest.raises(DataError, match="truncated"):
            reader.read(0, size + PAGE_BYTES, buffer(size + 2 * PAGE_BYTES))
    finally:
        reader.close()


@pytest.mark.parametrize("size", [1, PAGE_BYTES, (2 << 20) - 1, (2 << 20) + 5, 16 << 20])
def test_buffers_begin_at_a_page(size):
    made = buffer(size)
    assert made.size == size and made.ctypes.data % PAGE_BYTES == 0
    made[:] = 7
    assert int(made.min()) == 7
    assert size < 2 << 20 or made.ctypes.data % (2 << 20) == 0
