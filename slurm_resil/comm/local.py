"""Communicator of threads in this process: one rank for a single node, several for tests of collective code."""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

from slurm_resil.comm.base import MAX_WRITE_BYTES, Bytes, Runs

T = TypeVar("T")
_TIMEOUT_S = 120.0


class _Group:
    """Barrier that, unlike threading.Barrier, still lets those through who had all arrived before it broke."""

    def __init__(self, size: int) -> None:
        self.parts: list[Sequence[bytes]] = [()] * size
        self._changed = threading.Condition()
        self._arrived = self._generation = 0
        self._broken = False
        self._sent: dict[tuple[int, int, int], Bytes] = {}  # by sender, receiver, and number between these two

    def send(self, pair: tuple[int, int], number: int, data: Bytes) -> None:
        with self._changed:
            self._sent[(*pair, number)] = data
            self._changed.notify_all()

    def receive(self, pair: tuple[int, int], number: int) -> Bytes:
        key = (*pair, number)
        with self._changed:
            self._changed.wait_for(lambda: self._broken or key in self._sent, _TIMEOUT_S)
            if key not in self._sent:
                raise threading.BrokenBarrierError
            return self._sent.pop(key)

    def wait(self) -> None:
        with self._changed:
            mine = self._generation
            self._arrived += 1
            if self._arrived == len(self.parts) and not self._broken:
                self._arrived = 0
                self._generation += 1
                self._changed.notify_all()
                return
            self._changed.wait_for(lambda: self._broken or self._generation != mine, _TIMEOUT_S)
            if self._generation == mine:
                self._broken = True
                self._changed.notify_all()
                raise threading.BrokenBarrierError

    def abort(self) -> None:
        with self._changed:
            self._broken = True
            self._changed.notify_all()


class Sent:
    """A message that was copied when it was sent."""

    def wait(self) -> None:
        """See Transfer."""


class Awaited:
    """A message to be received."""

    def __init__(self, group: _Group, pair: tuple[int, int], number: int, out: Bytes) -> None:
        self._group, self._pair, self._number, self._out = group, pair, number, out

    def wait(self) -> None:
        """See Transfer."""
        data = self._group.receive(self._pair, self._number)
        if data.size != self._out.size:
            raise ValueError(f"a message of {data.size} bytes, expected {self._out.size}")
        self._out[:] = data


class LocalFile:
    """File of a local communicator: each rank writes by ``pwrite``."""

    def __init__(self, comm: LocalCommunicator, path: str) -> None:
        self._comm = comm
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, data: Bytes, runs: Runs) -> None:
        """See File."""
        if runs.nbytes > MAX_WRITE_BYTES:
            raise ValueError(f"{runs.nbytes} bytes in one write, the limit is {MAX_WRITE_BYTES}")
        runs = runs.merged()
        view = data.data
        try:
            for source, target, length in zip(
                runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True
            ):
                part = view[source : source + length]
                while part:
                    done = os.pwrite(self._fd, part, target)
                    part, target = part[done:], target + done
        finally:
            self._comm.barrier()

    def sync(self) -> None:
        """See File."""
        try:
            os.fsync(self._fd)
        finally:
            self._comm.barrier()

    def close(self) -> None:
        """See File."""
        os.close(self._fd)
        self._comm.barrier()


class LocalCommunicator:
    """One rank of a group of threads; without arguments a group of one."""

    def __init__(self, rank: int = 0, group: _Group | None = None) -> None:
        self._rank = rank
        self._group = group or _Group(1)
        self._to: dict[int, Iterator[int]] = defaultdict(itertools.count)
        self._from: dict[int, Iterator[int]] = defaultdict(itertools.count)

    @property
    def rank(self) -> int:
        """See Communicator."""
        return self._rank

    @property
    def size(self) -> int:
        """See Communicator."""
        return len(self._group.parts)

    def barrier(self) -> None:
        """See Communicator."""
        self._group.wait()

    def bcast(self, data: bytes, root: int = 0) -> bytes:
        """See Communicator."""
        return self.allgather(data)[root]

    def allgather(self, data: bytes) -> list[bytes]:
        """See Communicator."""
        return [parts[0] for parts in self._shown([data])]

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """See Communicator."""
        return [shown[self._rank] for shown in self._shown(parts)]

    def swap(self, values: Sequence[int]) -> list[int]:
        """See Communicator."""
        return [int(part) for part in self.exchange([str(value).encode() for value in values])]

    def _shown(self, parts: Sequence[bytes]) -> list[Sequence[bytes]]:
        self._group.parts[self._rank] = parts
        self.barrier()
        everybody = list(self._group.parts)
        self.barrier()
        return everybody

    def max(self, value: int) -> int:
        """See Communicator."""
        return max(int(part) for part in self.allgather(str(value).encode()))

    def isend(self, data: Bytes, to: int) -> Sent:
        """See Communicator."""
        self._group.send((self._rank, to), next(self._to[to]), data.copy())
        return Sent()

    def irecv(self, out: Bytes, source: int) -> Awaited:
        """See Communicator."""
        return Awaited(self._group, (source, self._rank), next(self._from[source]), out)

    def open(self, path: str, hints: Mapping[str, str]) -> LocalFile:
        """See Communicator."""
        try:
            return LocalFile(self, path)
        finally:
            self.barrier()

    def abort(self, code: int) -> NoReturn:
        """See Communicator: breaks the barrier, so that all others get BrokenBarrierError."""
        self._group.abort()
        raise SystemExit(code)


def run(size: int, work: Callable[[LocalCommunicator], T]) -> list[T]:
    """Run collective code on ``size`` threads.

    Returns:
        The results by rank.

    Raises:
        BaseException: The first rank's error that is not the consequence of another's.
    """
    group = _Group(size)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = work(LocalCommunicator(rank, group))
        except BaseException as error:  # noqa: BLE001 - top of a thread: handed to the caller
            failures.append(error)
            if not isinstance(error, threading.BrokenBarrierError):
                group.abort()

    threads = [threading.Thread(target=one, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]
