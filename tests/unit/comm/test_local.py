"""What is of the base and the local communicator alone; the common suite is tests/contract/test_communicator.py."""

from __future__ import annotations

import errno
import os
import threading
import time

import numpy as np
import pytest

from slurm_resil.comm import base, local
from slurm_resil.comm.base import Runs, agreed, from_os_error
from slurm_resil.core.errors import DataError, RefusedError, ResilError, SpaceError, StorageError


def test_a_rank_alone():
    comm = local.LocalCommunicator()
    assert (comm.rank, comm.size) == (0, 1)
    comm.barrier()
    assert comm.allgather(b"x") == [b"x"] and comm.bcast(b"y") == b"y" and comm.max(-3) == -3


def test_run_gives_results_by_rank():
    assert local.run(5, lambda comm: comm.rank * comm.size) == [0, 5, 10, 15, 20]


@pytest.mark.parametrize("repeat", range(20))
def test_an_agreed_error_reaches_all_ranks_even_if_one_leaves_at_once(repeat):
    caught = []

    def work(comm):
        try:
            with agreed(comm, "working"):
                if comm.rank == 0:
                    raise DataError("bad")
        except DataError:
            if comm.rank == 3:
                time.sleep(0.001)
            caught.append(comm.rank)
            raise

    with pytest.raises(DataError):
        local.run(4, work)
    assert sorted(caught) == [0, 1, 2, 3]


def test_abort_lets_nobody_wait():
    def work(comm):
        if comm.rank == 0:
            comm.abort(7)
        comm.barrier()

    with pytest.raises(SystemExit) as caught:
        local.run(3, work)
    assert caught.value.code == 7


def test_a_rank_that_never_comes_is_a_broken_barrier(monkeypatch):
    monkeypatch.setattr(local, "_TIMEOUT_S", 0.2)
    with pytest.raises(threading.BrokenBarrierError):
        local.run(2, lambda comm: comm.barrier() if comm.rank == 0 else None)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, SpaceError),
        (errno.EDQUOT, SpaceError),
        (errno.EROFS, RefusedError),
        (errno.EIO, StorageError),
        (errno.ESTALE, StorageError),
        (errno.EINVAL, ResilError),
    ],
)
def test_errors_of_the_system(number, kind):
    error = from_os_error(OSError(number, os.strerror(number), "/pfs/x"), "writing")
    assert type(error) is kind and "/pfs/x" in str(error) and os.strerror(number) in str(error)


def test_merged_sorts_and_joins():
    def runs(*rows):
        columns = np.array(rows, np.int64)
        return Runs(source=columns[:, 0], target=columns[:, 1], length=columns[:, 2])

    merged = runs((10, 30, 5), (0, 10, 5), (5, 15, 5), (15, 40, 5)).merged()
    assert merged.source.tolist() == [0, 10, 15]
    assert merged.target.tolist() == [10, 30, 40]
    assert merged.length.tolist() == [10, 5, 5]
    assert merged.nbytes == 20
    empty = np.empty(0, np.int64)
    assert Runs(source=empty, target=empty, length=empty).merged().nbytes == 0


def test_an_error_of_some_nodes_names_them(monkeypatch):
    """Paths are the same on all nodes: an error that only some of them have would not say whose disk it is."""
    here = threading.local()
    monkeypatch.setattr(base, "_node", lambda: here.name)

    def one(words):
        def work(comm):
            here.name = f"node{comm.rank + 1}"
            with pytest.raises(SpaceError) as caught, agreed(comm, "writing"):
                if words[comm.rank]:
                    raise SpaceError(words[comm.rank])
            return caught.value.message

        return set(local.run(3, work))

    assert one(["", "/bb is full", ""]) == {"/bb is full (on node2)"}
    assert one(["/bb is full", "/bb is full", ""]) == {"/bb is full (on node1, node2)"}
    assert one(["/bb is full"] * 3) == {"/bb is full"}
    assert one(["", "", "node3 has no space"]) == {"node3 has no space"}
    assert one(["a", "b", ""]) == {"a (on node1); b (on node2)"}
