"""Communicator over MPI: the only module that imports mpi4py. Importing it is cheap, :func:`world` starts MPI."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from slurm_resil.comm.base import MAX_WRITE_BYTES, Bytes, Runs
from slurm_resil.core.errors import ConfigError

_LAUNCHED = ("PMI_RANK", "PMI_FD", "PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_PART_BYTES = 1 << 30


def launched(env: Mapping[str, str]) -> bool:
    """Whether this process was started by an MPI launcher."""
    return any(name in env for name in _LAUNCHED)


def world() -> MpiCommunicator:
    """Start MPI and return all processes of the launch.

    Raises:
        ConfigError: mpi4py or its MPI library is missing.
    """
    try:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"MPI cannot be used here: {error}", mend="install the extra `mpi` (mpi4py and mpich)"
        ) from error
    return MpiCommunicator(MPI, MPI.COMM_WORLD)


class MpiFile:
    """File of an MPI communicator: collective writes through a file view."""

    def __init__(self, mpi: Any, file: Any) -> None:
        self._mpi, self._file = mpi, file

    def write(self, data: Bytes, runs: Runs) -> None:
        """See File."""
        byte = self._mpi.BYTE
        if runs.nbytes > MAX_WRITE_BYTES:
            raise ValueError(f"{runs.nbytes} bytes in one write, the limit is {MAX_WRITE_BYTES}")
        runs = runs.merged()
        if runs.length.size == 0:
            self._call(lambda: self._file.Set_view(0, byte, byte))
            self._call(lambda: self._file.Write_all([data, 0, byte]))
            return
        length = runs.length.astype(np.int32)
        in_file = byte.Create_hindexed(length, runs.target).Commit()
        in_data = byte.Create_hindexed(length, runs.source).Commit()
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
        self._comm.Barrier()

    def bcast(self, data: bytes, root: int = 0) -> bytes:
        """See Communicator."""
        size = self._bcast_size(len(data), root)
        buffer = np.frombuffer(data, np.uint8).copy() if self.rank == root else np.empty(size, np.uint8)
        for at in range(0, size, _PART_BYTES):
            self._comm.Bcast([buffer[at : at + _PART_BYTES], self._mpi.BYTE], root)
        return buffer.tobytes()

    def _bcast_size(self, size: int, root: int) -> int:
        box = np.array([size], np.int64)
        self._comm.Bcast(box, root)
        return int(box[0])

    def allgather(self, data: bytes) -> list[bytes]:
        """See Communicator."""
        sizes = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([len(data)], np.int64), sizes)
        if int(sizes.sum()) > _PART_BYTES:
            return [self.bcast(data, root) for root in range(self.size)]
        buffer = np.empty(int(sizes.sum()), np.uint8)
        self._comm.Allgatherv(np.frombuffer(data, np.uint8), [buffer, sizes.astype(np.int32), self._mpi.BYTE])
        ends = np.cumsum(sizes)
        return [buffer[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)]

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """See Communicator."""
        sent = np.array([len(part) for part in parts], np.int64)
        got = np.empty_like(sent)
        self._comm.Alltoall(sent, got)
        if self.max(int(max(sent.sum(), got.sum()))) > _PART_BYTES:
            return [self._scattered(parts, root, int(got[root])) for root in range(self.size)]
        buffer = np.empty(int(got.sum()), np.uint8)
        data = np.frombuffer(b"".join(parts), np.uint8)
        byte = self._mpi.BYTE
        self._comm.Alltoallv([data, sent.astype(np.int32), byte], [buffer, got.astype(np.int32), byte])
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

    def max(self, value: int) -> int:
        """See Communicator."""
        result = np.empty(1, np.int64)
        self._comm.Allreduce(np.array([value], np.int64), result, self._mpi.MAX)
        return int(result[0])

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
        return MpiFile(self._mpi, file)

    def abort(self, code: int) -> NoReturn:
        """See Communicator."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._comm.Abort(code)
        os._exit(code)


def _os_error(mpi: Any, error: Any, path: str | None = None) -> OSError:
    kinds = {
        mpi.ERR_NO_SPACE: errno.ENOSPC,
        mpi.ERR_QUOTA: errno.EDQUOT,
        mpi.ERR_READ_ONLY: errno.EROFS,
        mpi.ERR_ACCESS: errno.EACCES,
        mpi.ERR_NO_SUCH_FILE: errno.ENOENT,
    }
    kind = error.Get_error_class()
    code = kinds.get(kind, errno.EIO)
    words = os.strerror(code) if kind in kinds else " ".join(str(error.Get_error_string()).split())
    return OSError(code, words, path) if path else OSError(code, words)
