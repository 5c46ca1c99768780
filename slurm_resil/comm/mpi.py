"""Communicator over MPI: the only module that imports mpi4py. Importing it is cheap, :func:`world` starts MPI."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from slurm_resil.comm import pmi
from slurm_resil.comm.base import MAX_WRITE_BYTES, Bytes, Runs
from slurm_resil.core.errors import ConfigError

_LAUNCHED = ("PMI_RANK", "PMI_FD", "PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_PART_BYTES = 1 << 30
_FRAME_BYTES = 256  # of what is gathered or told by all, so much goes at once: the most of it is short
_SHORT_BYTES = _FRAME_BYTES - 8
_TAG = 1  # of single transfers
_SPIN_S = 0.0005  # asked for without a pause so long, but the core goes to who else wants it
_PAUSE_S = (0.00002, 0.001)  # then with pauses, the shortest and the longest: a mover that waits costs little
_PATIENCE = 8  # a pause is this part of the wait so far: what comes is found about so much later
START_LIMIT_S = 300.0  # the address exchange of some thousand nodes takes seconds
# of these MPI knows no class, or does not use it: they are in its words only
_SAID = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EIO)


def launched(env: Mapping[str, str]) -> bool:
    """Whether this process was started by an MPI launcher."""
    return any(name in env for name in _LAUNCHED)


def world() -> MpiCommunicator:
    """Start MPI and return all processes of the launch.

    It waits for all of them, with the interpreter held: nothing but the kernel can end that wait. After a time limit
    SIGALRM kills this process.

    Raises:
        ConfigError: mpi4py or its MPI library is missing.
    """
    try:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        pmi.shorten(os.environ)
        before = signal.setitimer(signal.ITIMER_REAL, START_LIMIT_S)
        try:
            from mpi4py import MPI
        finally:
            signal.setitimer(signal.ITIMER_REAL, *before)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"MPI cannot be used here: {error}", mend="install the extra `mpi` (mpi4py and mpich)"
        ) from error
    return MpiCommunicator(MPI, MPI.COMM_WORLD)


class MpiFile:
    """File of an MPI communicator: collective writes through a file view."""

    def __init__(self, mpi: Any, file: Any, comm: MpiCommunicator) -> None:
        self._mpi, self._file, self._comm = mpi, file, comm
        self._plain = True  # the view is the file itself

    def write(self, data: Bytes, runs: Runs) -> None:
        """See File."""
        byte = self._mpi.BYTE
        if runs.nbytes > MAX_WRITE_BYTES:
            raise ValueError(f"{runs.nbytes} bytes in one write, the limit is {MAX_WRITE_BYTES}")
        runs = runs.merged()
        if self._comm.max(runs.length.size) <= 1:  # no view is needed: its change would make all wait, each on a core
            if not self._plain:
                self._call(lambda: self._file.Set_view(0, byte, byte))
                self._plain = True
            source, target, length = (int(part.sum()) for part in (runs.source, runs.target, runs.length))
            self._call(lambda: self._file.Write_at_all(target, [data[source : source + length], length, byte]))
            return
        self._plain = False
        if runs.length.size == 0:
            self._call(lambda: self._file.Set_view(0, byte, byte))
            self._call(lambda: self._file.Write_all([data, 0, byte]))
            return
        lengths = runs.length.astype(np.int32)
        in_file = byte.Create_hindexed(lengths, runs.target).Commit()
        in_data = byte.Create_hindexed(lengths, runs.source).Commit()
        try:
            self._call(lambda: self._file.Set_view(0, byte, in_file))
            self._call(lambda: self._file.Write_all([data, 1, in_data]))
        finally:
            in_file.Free()
            in_data.Free()

    def sync(self) -> None:
        """See File."""
        self._call(self._file.Sync)

    def close(self) -> None:
        """See File."""
        self._call(self._file.Close)

    def _call(self, function: Any) -> None:
        try:
            function()
        except self._mpi.Exception as error:
            raise _os_error(self._mpi, error) from error


def wait(request: Any, status: Any = None) -> None:
    """Wait for a request. MPI's own ways of waiting burn a core, which the training needs."""
    began = time.monotonic()
    while not request.Test(status):
        waited = time.monotonic() - began
        if waited < _SPIN_S:
            os.sched_yield()
        else:
            time.sleep(min(max(waited / _PATIENCE, _PAUSE_S[0]), _PAUSE_S[1]))


class MpiTransfer:
    """A nonblocking message; ``nbytes`` is what must arrive, None for one that is sent."""

    def __init__(self, mpi: Any, request: Any, nbytes: int | None) -> None:
        self._mpi, self._request, self._nbytes = mpi, request, nbytes

    def wait(self) -> None:
        """See Transfer."""
        status = self._mpi.Status()
        try:
            wait(self._request, status)
        except self._mpi.Exception as error:
            if error.Get_error_class() != self._mpi.ERR_TRUNCATE:
                raise
            raise ValueError(f"a message of more than {self._nbytes} bytes") from error
        if self._nbytes is not None and status.Get_count(self._mpi.BYTE) != self._nbytes:
            raise ValueError(f"a message of {status.Get_count(self._mpi.BYTE)} bytes, expected {self._nbytes}")


class MpiCommunicator:
    """All processes of an MPI launch."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm

    @property
    def rank(self) -> int:
        """See Communicator."""
        return int(self._comm.rank)

    @property
    def size(self) -> int:
        """See Communicator."""
        return int(self._comm.size)

    def barrier(self) -> None:
        """See Communicator."""
        wait(self._comm.Ibarrier())

    def bcast(self, data: bytes, root: int = 0) -> bytes:
        """See Communicator."""
        frame = _framed(data) if self.rank == root else np.empty(_FRAME_BYTES, np.uint8)
        wait(self._comm.Ibcast([frame, self._mpi.BYTE], root))
        size, head = _unframed(frame)
        if size <= _SHORT_BYTES:
            return head
        buffer = np.frombuffer(data, np.uint8).copy() if self.rank == root else np.empty(size, np.uint8)
        for at in range(0, size, _PART_BYTES):
            wait(self._comm.Ibcast([buffer[at : at + _PART_BYTES], self._mpi.BYTE], root))
        return buffer.tobytes()

    def allgather(self, data: bytes) -> list[bytes]:
        """See Communicator."""
        frames = np.empty((self.size, _FRAME_BYTES), np.uint8)
        wait(self._comm.Iallgather([_framed(data), self._mpi.BYTE], [frames, self._mpi.BYTE]))
        heads = [_unframed(frame) for frame in frames]
        sizes = np.array([size for size, _ in heads], np.int64)
        if int(sizes.max()) <= _SHORT_BYTES:
            return [head for _, head in heads]
        if int(sizes.sum()) > _PART_BYTES:
            return [self.bcast(data, root) for root in range(self.size)]
        buffer = np.empty(int(sizes.sum()), np.uint8)
        counts = sizes.astype(np.int32)
        wait(self._comm.Iallgatherv(np.frombuffer(data, np.uint8), [buffer, counts, self._mpi.BYTE]))
        ends = np.cumsum(sizes)
        return [buffer[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)]

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """See Communicator."""
        sent = np.array([len(part) for part in parts], np.int64)
        got = np.array(self.swap(sent.tolist()), np.int64)
        if self.max(int(max(sent.sum(), got.sum()))) > _PART_BYTES:
            return [self._scattered(parts, root, int(got[root])) for root in range(self.size)]
        buffer = np.empty(int(got.sum()), np.uint8)
        data = np.frombuffer(b"".join(parts), np.uint8)
        byte = self._mpi.BYTE
        to, of = sent.astype(np.int32), got.astype(np.int32)
        wait(self._comm.Ialltoallv([data, to, byte], [buffer, of, byte]))
        ends = np.cumsum(got)
        return [buffer[end - size : end].tobytes() for end, size in zip(ends, got, strict=True)]

    def _scattered(self, parts: Sequence[bytes], root: int, size: int) -> bytes:
        """One rank's parts, too large to go together: one message to each, in pieces."""
        if self.rank == root:
            for to, part in enumerate(parts):
                for at in range(0, len(part) if to != root else 0, _PART_BYTES):
                    piece = np.frombuffer(part, np.uint8)[at : at + _PART_BYTES]
                    self._comm.Send([piece, self._mpi.BYTE], to)
            return parts[root]
        buffer = np.empty(size, np.uint8)
        for at in range(0, size, _PART_BYTES):
            self._comm.Recv([buffer[at : at + _PART_BYTES], self._mpi.BYTE], root)
        return buffer.tobytes()

    def swap(self, values: Sequence[int]) -> list[int]:
        """See Communicator."""
        given = np.array(values, np.int64)
        got = np.empty_like(given)
        wait(self._comm.Ialltoall(given, got))
        return [int(value) for value in got]

    def max(self, value: int) -> int:
        """See Communicator."""
        result = np.empty(1, np.int64)
        own = np.array([value], np.int64)
        wait(self._comm.Iallreduce(own, result, self._mpi.MAX))
        return int(result[0])

    def isend(self, data: Bytes, to: int) -> MpiTransfer:
        """See Communicator."""
        return MpiTransfer(self._mpi, self._comm.Isend([data, self._mpi.BYTE], to, _TAG), None)

    def irecv(self, out: Bytes, source: int) -> MpiTransfer:
        """See Communicator."""
        return MpiTransfer(self._mpi, self._comm.Irecv([out, self._mpi.BYTE], source, _TAG), out.size)

    def open(self, path: str, hints: Mapping[str, str]) -> MpiFile:
        """See Communicator."""
        info = self._mpi.Info.Create()
        for key, value in hints.items():
            info.Set(key, value)
        try:
            file = self._mpi.File.Open(self._comm, path, self._mpi.MODE_RDWR, info)  # holes are read, then written
        except self._mpi.Exception as error:
            raise _os_error(self._mpi, error, path) from error
        finally:
            info.Free()
        return MpiFile(self._mpi, file, self)

    def abort(self, code: int) -> NoReturn:
        """See Communicator."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._comm.Abort(code)
        os._exit(code)


def _framed(data: bytes) -> Bytes:
    """The size of a message and its beginning: all of it if it is short."""
    frame = np.zeros(_FRAME_BYTES, np.uint8)
    frame[:8].view(np.int64)[0] = len(data)
    head = np.frombuffer(data[:_SHORT_BYTES], np.uint8)
    frame[8 : 8 + head.size] = head
    return frame


def _unframed(frame: Bytes) -> tuple[int, bytes]:
    size = int(frame[:8].view(np.int64)[0])
    return size, frame[8 : 8 + min(size, _SHORT_BYTES)].tobytes()


def _os_error(mpi: Any, error: Any, path: str | None = None) -> OSError:
    kinds = {
        mpi.ERR_NO_SPACE: errno.ENOSPC,
        mpi.ERR_QUOTA: errno.EDQUOT,
        mpi.ERR_READ_ONLY: errno.EROFS,
        mpi.ERR_ACCESS: errno.EACCES,
        mpi.ERR_NO_SUCH_FILE: errno.ENOENT,
    }
    text = " ".join(str(error.Get_error_string()).split())
    kind = error.Get_error_class()
    code = kinds.get(kind) or next((one for one in _SAID if os.strerror(one) in text), None)
    words = os.strerror(code) if code else text
    code = code or errno.EIO
    return OSError(code, words, path) if path else OSError(code, words)
