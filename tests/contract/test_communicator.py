"""One suite over every communicator: the local one on threads here, the MPI one on processes by mpiexec."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slurm_resil.comm import local
from slurm_resil.comm.base import (
    MAX_WRITE_BYTES,
    Communicator,
    Runs,
    agree,
    agreed,
    allgather_json,
    bcast_json,
    stopped,
)
from slurm_resil.core.errors import DataError, ResilError, SpaceError, TryAgainError

SIZES = (1, 2, 4)


def runs(*rows: tuple[int, int, int]) -> Runs:
    columns = np.array(rows, np.int64).reshape(-1, 3)
    return Runs(source=columns[:, 0], target=columns[:, 1], length=columns[:, 2])


def check_collectives(comm: Communicator, root: Path) -> None:
    comm.barrier()
    parts = comm.allgather(bytes([comm.rank]) * comm.rank)
    assert parts == [bytes([rank]) * rank for rank in range(comm.size)]
    assert comm.allgather(b"") == [b""] * comm.size
    for sender in range(comm.size):
        assert comm.bcast(f"from {comm.rank}".encode(), sender) == f"from {sender}".encode()
    assert comm.max(-comm.rank) == 0
    assert comm.max((1 << 40) + comm.rank) == (1 << 40) + comm.size - 1
    assert allgather_json(comm, {"rank": comm.rank}) == [{"rank": rank} for rank in range(comm.size)]
    assert bcast_json(comm, ["x", comm.rank], comm.size - 1) == ["x", comm.size - 1]
    sent = [bytes([comm.rank, to]) * (comm.rank + to) for to in range(comm.size)]
    assert comm.exchange(sent) == [bytes([sender, comm.rank]) * (sender + comm.rank) for sender in range(comm.size)]
    assert comm.exchange([b""] * comm.size) == [b""] * comm.size
    big = np.full(3 << 20, comm.rank, np.uint8).tobytes()
    assert comm.allgather(big) == [bytes([rank]) * (3 << 20) for rank in range(comm.size)]
    assert comm.bcast(big) == bytes(3 << 20)


def check_large_messages(comm: Communicator, root: Path) -> None:
    """In pieces: the limit is made small."""
    from slurm_resil.comm import mpi

    mpi._PART_BYTES = 1000
    try:
        sent = [bytes([comm.rank, to]) * (1500 * to + comm.rank) for to in range(comm.size)]
        expected = [bytes([sender, comm.rank]) * (1500 * comm.rank + sender) for sender in range(comm.size)]
        assert comm.exchange(sent) == expected
        assert comm.allgather(bytes([comm.rank]) * 1700) == [bytes([rank]) * 1700 for rank in range(comm.size)]
    finally:
        comm.barrier()
        mpi._PART_BYTES = 1 << 30


def check_agreement(comm: Communicator, root: Path) -> None:
    last = comm.size - 1
    assert agree(comm, None) is False
    assert agree(comm, None, asked=comm.rank == last) is True
    with pytest.raises(DataError, match=r"rank \d is bad") as caught:
        agree(comm, DataError("rank 0 is bad", mend="mend it", path="/x") if comm.rank == last else None)
    assert caught.value.mend == "mend it" and caught.value.context == {"path": "/x"}
    with pytest.raises(SpaceError) as full, agreed(comm, "writing"):
        if comm.rank == 0:
            raise OSError(28, "No space left on device", "/pfs/x")
    assert str(full.value).startswith("writing: /pfs/x: No space left on device")
    with pytest.raises(ResilError) as both, agreed(comm, "working"):
        raise DataError(f"fault {comm.rank % 2}")
    assert str(both.value) == "; ".join(f"fault {i}" for i in range(min(comm.size, 2)))
    with pytest.raises(TryAgainError), agreed(comm, "working"):
        raise stopped("drain")


def check_interleaved_writes(comm: Communicator, root: Path) -> None:
    """Each rank writes every size-th word, twice over, in any order of runs."""
    path = make(comm, root / "interleaved", 0)
    words, size = 500, comm.size
    data = np.concatenate([np.full(7, (word * size + comm.rank) % 251, np.uint8) for word in range(words)])
    order = np.random.default_rng(comm.rank).permutation(words)
    for hints in ({}, {"romio_cb_write": "enable"}, {"romio_cb_write": "disable", "romio_ds_write": "disable"}):
        file = comm.open(path, {**hints, "no_such_hint": "x"})
        for part in np.array_split(order, 3):
            file.write(data, Runs(source=part * 7, target=(part * size + comm.rank) * 7, length=np.full(part.size, 7)))
        file.write(data, runs())
        file.sync()
        file.close()
        expected = np.repeat(np.arange(words * size) % 251, 7).astype(np.uint8).tobytes()
        assert Path(path).read_bytes() == expected
        comm.barrier()
        if comm.rank == 0:
            Path(path).write_bytes(b"")
        comm.barrier()


def check_some_ranks_write_nothing(comm: Communicator, root: Path) -> None:
    path = make(comm, root / "alone", 64)
    file = comm.open(path, {})
    file.write(np.arange(32, dtype=np.uint8), runs((0, 32, 16), (16, 0, 8)) if comm.rank == comm.size - 1 else runs())
    file.sync()
    file.close()
    raw = Path(path).read_bytes()
    assert raw[32:48] == bytes(range(16)) and raw[:8] == bytes(range(16, 24)) and len(raw) == 64
    assert raw[8:32] == bytes(24) and raw[48:] == bytes(16)


def check_far_offsets(comm: Communicator, root: Path) -> None:
    """Places beyond 2^32 in a sparse file."""
    path = make(comm, root / "far", (5 << 30) + 64)
    file = comm.open(path, {"romio_ds_write": "disable"})
    file.write(np.full(8, comm.rank + 1, np.uint8), runs((0, (5 << 30) + 8 * comm.rank, 8)))
    file.sync()
    file.close()
    with open(path, "rb") as raw:
        raw.seek(5 << 30)
        expected = b"".join(bytes([rank + 1]) * 8 for rank in range(comm.size))
        assert raw.read(8 * comm.size) == expected
    comm.barrier()
    if comm.rank == 0:
        os.unlink(path)


def check_too_much_at_once(comm: Communicator, root: Path) -> None:
    path = make(comm, root / "much", 0)
    file = comm.open(path, {})
    with pytest.raises(ValueError, match="in one write"):
        file.write(np.empty(1, np.uint8), runs((0, 0, MAX_WRITE_BYTES + 1)))
    file.close()


def check_missing_file(comm: Communicator, root: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        comm.open(str(root / "nowhere" / "file"), {})
    with pytest.raises(ResilError, match=r"opening it: .*nowhere"), agreed(comm, "opening it"):
        comm.open(str(root / "nowhere" / "file"), {})


def check_transfers(comm: Communicator, root: Path) -> None:
    """All to all, in order between two ranks, waited for in any order, oneself among them."""
    rng = np.random.default_rng(comm.rank)
    sizes = (1, 300_000, 7)
    out = [np.full(size, comm.rank * comm.size + to, np.uint8) for to in range(comm.size) for size in sizes]
    into = [np.zeros(size, np.uint8) for _ in range(comm.size) for size in sizes]
    receiving = [comm.irecv(into[3 * source + part], source) for source in range(comm.size) for part in range(3)]
    sending = [comm.isend(out[3 * to + part], to) for to in range(comm.size) for part in range(3)]
    waits = [*receiving, *sending]
    for index in rng.permutation(len(waits)):
        waits[index].wait()
    for source in range(comm.size):
        for part in range(3):
            assert (into[3 * source + part] == source * comm.size + comm.rank).all()
            assert into[3 * source + part].size == sizes[part]


def check_transfers_pass_a_rank_that_is_late(comm: Communicator, root: Path) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffer = np.zeros(9, np.uint8)
    if comm.rank == 0:
        time.sleep(0.05)
    receiving = comm.irecv(buffer, before)
    comm.isend(np.full(9, comm.rank, np.uint8), after).wait()
    receiving.wait()
    assert (buffer == before).all()


def check_a_message_of_another_size_is_an_error(comm: Communicator, root: Path) -> None:
    for nbytes in (3, 7):
        receiving = comm.irecv(np.zeros(4, np.uint8), comm.rank)
        sending = comm.isend(np.zeros(nbytes, np.uint8), comm.rank)
        with pytest.raises(ValueError, match="a message of"):
            receiving.wait()
        sending.wait()


def make(comm: Communicator, path: Path, size: int) -> str:
    if comm.rank == 0:
        path.write_bytes(b"")
        os.truncate(path, size)
    comm.barrier()
    return str(path)


CHECKS: dict[str, Callable[[Communicator, Path], None]] = {
    name: check for name, check in globals().items() if name.startswith("check_")
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHECKS)
def test_local(name: str, size: int, tmp_path: Path) -> None:
    local.run(size, lambda comm: CHECKS[name](comm, tmp_path))


@pytest.mark.mpi
@pytest.mark.parametrize("size", SIZES)
def test_mpi(size: int, tmp_path: Path) -> None:
    """All checks in one launch: starting MPI takes longer than they do."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    program = str(mpiexec) if mpiexec.exists() else shutil.which("mpiexec")
    if program is None:
        pytest.skip("no mpiexec")
    argv = [program, "-n", str(size), sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == size * len(CHECKS)


def test_local_fault_on_one_rank_ends_all() -> None:
    waiting = threading.Event()

    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            waiting.wait(20)
            raise RuntimeError("a fault of the program")
        waiting.set()
        comm.barrier()

    with pytest.raises(RuntimeError, match="a fault of the program"):
        local.run(2, work)


def main(root: Path) -> None:
    from slurm_resil.comm import mpi

    comm = mpi.world()
    for name, check in CHECKS.items():
        check(comm, root)
        comm.barrier()
        print(name, "passed", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
