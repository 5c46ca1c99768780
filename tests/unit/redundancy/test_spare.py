"""Parities of an encode that nobody needs are written over by the next one, and never believed or taken from others."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from setworld import ITERATION, protect, restore, snapshot, wipe, world

from slurm_resil.catalog import LocalCatalog
from slurm_resil.comm import local
from slurm_resil.core import paths, spare
from slurm_resil.core.errors import DataError, SpaceError
from slurm_resil.core.throttle import Throttle
from slurm_resil.redundancy import flow, member, tidy
from slurm_resil.redundancy.package import make_room


def parity(here, node, iteration=ITERATION):
    return paths.parity(here.job_dir(node), iteration, node)


def spares(here, node=0):
    directory = paths.redundancy(here.job_dir(node))
    return [os.path.join(directory, name) for name in os.listdir(directory) if name.endswith(spare.ENDING)]


def forget(here):
    """As the agents do it before a slot is given away."""
    for node in range(here.nodes):
        LocalCatalog(here.job_dir(node)).forget(ITERATION)


def whole_again(here):
    """A node is lost; all that it had comes back."""
    before = snapshot(here)
    wipe(here, 1)
    restore(here)
    after = snapshot(here)
    assert {path for path in before if before[path] != after.get(path)} == set()


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_it_is_written_over_whatever_it_holds(tmp_path, size):
    here = world(tmp_path, 3)
    protect(here, "xor")
    forget(here)
    inodes = []
    for node in range(3):
        (path,) = spares(here, node)
        with open(path, "r+b") as file:
            file.truncate(0)
            file.write(b"\xaa" * size)
        inodes.append(os.stat(path).st_ino)
    protect(here, "xor")
    assert [os.stat(parity(here, node)).st_ino for node in range(3)] == inodes
    assert not spares(here)
    whole_again(here)


def test_who_reads_it_keeps_it(tmp_path):
    here = world(tmp_path, 2)
    protect(here, "partner")
    ((manifest, *_), _) = member.listed(here.job_dir(0))
    with member.ParityReader(here.job_dir(0), manifest) as reader:
        (held,) = manifest.parities
        before = reader.source(held).read(0, np.empty(held.nbytes, np.uint8)).copy()
        inode = os.stat(reader.path).st_ino
        forget(here)
        here.seal(ITERATION + 1, slot=1)
        protect(here, "partner")
        assert os.stat(parity(here, 0, ITERATION + 1)).st_ino != inode
        assert (reader.source(held).read(0, np.empty(held.nbytes, np.uint8)) == before).all()


def test_one_that_is_taken_meanwhile_is_missing_for_who_comes_late(tmp_path):
    here = world(tmp_path, 2)
    protect(here, "partner")
    ((manifest, *_), _) = member.listed(here.job_dir(0))
    path = parity(here, 0)
    spare.retire(path)
    fd = spare.take(path)  # opened by its old name, it is being written already
    assert fd is not None
    with pytest.raises(DataError, match="removed a moment ago") as caught:
        member.ParityReader(here.job_dir(0), manifest)
    assert caught.value.context["fault"] == "missing"
    os.close(fd)


@pytest.mark.parametrize("how", ["symlink", "hard link", "directory", "pipe"])
def test_what_is_no_file_of_its_own_is_not_written(tmp_path, how):
    here = world(tmp_path, 2)
    protect(here, "xor")
    forget(here)
    (path,) = spares(here)
    os.unlink(path)
    other = tmp_path / "precious"
    other.write_bytes(b"precious")
    if how == "symlink":
        os.symlink(other, path)
    elif how == "hard link":
        os.link(other, path)
    elif how == "pipe":
        os.mkfifo(path)
    else:
        os.mkdir(path)
    protect(here, "xor")
    assert other.read_bytes() == b"precious"
    assert os.path.isfile(parity(here, 0)) and not os.path.islink(parity(here, 0))
    if os.path.lexists(path):  # left where it was; reading a pipe would wait for ever
        os.rmdir(path) if how == "directory" else os.unlink(path)
    whole_again(here)


def test_it_can_be_pruned_and_says_why_it_is_there(tmp_path):
    here = world(tmp_path, 2)
    protect(here, "xor")
    forget(here)
    (waste,) = tidy.waste(here.job_dir(0), None)
    assert waste.why == "kept for the next encode to write over"
    assert waste.nbytes > 0
    tidy.remove(here.job_dir(0), [waste])
    assert not spares(here)


def test_the_space_that_it_has_counts(tmp_path, monkeypatch):
    path = str(tmp_path / "file")
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, bytes(1 << 20))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096))
    make_room(fd, (1 << 20) + 4096, path)
    with pytest.raises(SpaceError, match=r"8192 bytes are needed, 4096 are free"):
        make_room(fd, (1 << 20) + 8192, path)
    os.close(fd)


@pytest.mark.parametrize(("sums", "segment"), [(1, 4 << 20), (4, 2 << 20), (40, 1 << 20)])
def test_segments_are_the_same_everywhere_and_fit_the_memory_of_who_needs_most(sums, segment):
    made = [
        flow.Sum(rank=1, sink=number, nbytes=8, terms=(flow.Term(rank=0, stream=0, nbytes=8, slot=0),))
        for number in range(sums)
    ]

    def one(comm):
        return flow.Flow(comm, made if comm.rank < 2 else [], {}, {}, throttle=Throttle(None, 0))._segment

    assert set(local.run(3, one)) == {segment}
