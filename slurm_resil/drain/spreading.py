"""Moves the blocks of a drained file: reads each once, sends it to all who want it, verifies it where it arrives.

All movers go through the pieces of the plan in the same order, each through those that concern it, a few at a time. So
nobody waits for what comes later, and the memory of a mover is a few pieces, however large the file is. A thread reads
ahead, another one hashes and writes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from slurm_resil.comm.base import Bytes, Communicator, Transfer, allgather_json, from_os_error
from slurm_resil.core import faults, fsio, pins
from slurm_resil.core.errors import DataError, ResilError
from slurm_resil.core.progress import Meter
from slurm_resil.core.throttle import Throttle
from slurm_resil.drain import check
from slurm_resil.drain.ahead import ahead, buffer
from slurm_resil.drain.spread import Piece
from slurm_resil.drain.staging import Staging
from slurm_resil.format.manifest import DrainedManifest, digest

READ_BYTES = 8 << 20  # of a piece
GRACE_S = 1.0  # so much longer than they would take by themselves ranks wait for a fetch
_UNDER_WAY = 4  # pieces of others that are on their way
_MEMORIES = _UNDER_WAY + 2  # two of them are being written
_OWN_UNDER_WAY = 2
_ROUND = 8  # pieces of a reader between two agreements
_TRIES, _PAUSE_S = 3, 0.5


@dataclass(frozen=True)
class Verdict:
    """How it went.

    Attributes:
        asked: Some mover was asked to stop.
        slow: Ranks have waited for it as long as they would take by themselves.
    """

    asked: bool = False
    slow: bool = False


@dataclass
class _Moving:
    piece: Piece
    memory: Bytes
    nbytes: int
    transfers: list[Transfer] = field(default_factory=list)
    written: Future[None] | None = None

    @property
    def data(self) -> Bytes:
        return self.memory[: self.nbytes]


class Source:
    """The drained file, read once.

    Args:
        path: The file.
        manifest: What it holds.
        cap_bytes_s: Limit of the reads, bytes/s; None: none.
        free: Asked while waiting for that; True ends the wait.

    Attributes:
        hurries: The limit does not hold any more.
        read_bytes: Bytes that were read.
        busy_s: What that took, seconds.
        problem: The first error; what it hit was sent on as it was, and nobody takes it.
    """

    def __init__(
        self, path: str, manifest: DrainedManifest, cap_bytes_s: float | None, free: Callable[[], bool]
    ) -> None:
        self._path, self._manifest = path, manifest
        self._throttle = Throttle(cap_bytes_s, READ_BYTES, stop=lambda: self.hurries or free())
        self.hurries = False
        self._fd: int | None = None
        self.read_bytes, self.busy_s = 0, 0.0
        self.problem: ResilError | None = None

    def close(self) -> None:
        """Close it."""
        if self._fd is not None:
            os.close(self._fd)

    def read(self, piece: Piece, out: Bytes) -> Bytes:
        """Read a piece. Thread."""
        size = self._manifest.block_bytes
        start, stop = piece.first * size, min(piece.stop * size, self._manifest.file_bytes)
        data = out[: stop - start]
        try:
            self._throttle.take(data.size)
            began = time.monotonic()
            self._patiently(data, start)
            self.busy_s += time.monotonic() - began
            self.read_bytes += data.size
        except OSError as error:
            self.problem = self.problem or from_os_error(error, f"reading {self._path}")
        except DataError as error:
            self.problem = self.problem or error
        else:
            for index in range(piece.first, piece.stop):
                block = data[index * size - start : (index + 1) * size - start]
                if digest(block) != self._manifest.blocks[index]:
                    hit = check.inside(self._manifest, index * size, (index + 1) * size)
                    words = f"{self._path}: block {index} is damaged{hit}"
                    self.problem = self.problem or DataError(words, path=self._path, fault="flipped")
        return data

    def _patiently(self, data: Bytes, start: int) -> None:
        for left in reversed(range(_TRIES)):
            try:
                faults.point("fetch.read")
                if self._fd is None:
                    self._fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    pins.share(self._fd)  # retention leaves it alone
                fsio.pread_into(self._fd, data.data, start, self._path)
                return
            except OSError as error:
                if not left or error.errno in fsio.UNREADABLE:
                    raise
                time.sleep(_PAUSE_S)


class Spreading:
    """See the module.

    Args:
        comm: Movers.
        manifest: Of the drained file.
        pieces: Plan, the same on all movers.
        source: The drained file.
        staging: This node's copy; None if it takes nothing.
        alone: Blocks that the ranks of each node would read by themselves.
        waited_for: Whether ranks of this node wait for it.
        stop: Asked between rounds; True on any mover ends it.
        meter: Hears how far it is.

    Attributes:
        problem: Why this node's copy cannot be written any more.
        wrong: Blocks that arrived here and did not match their hashes.
    """

    def __init__(
        self,
        comm: Communicator,
        manifest: DrainedManifest,
        pieces: Sequence[Piece],
        source: Source,
        staging: Staging | None,
        *,
        alone: Sequence[int],
        waited_for: Callable[[], bool],
        stop: Callable[[], bool],
        meter: Meter,
    ) -> None:
        self._comm, self._manifest, self._pieces, self._source = comm, manifest, pieces, source
        self._staging, self._alone, self._stop, self._meter = staging, alone, stop, meter
        self._waited_for, self._since = waited_for, float("inf")
        self._under_way: deque[_Moving] = deque()
        self._lent: deque[tuple[Bytes, Future[None]]] = deque()
        self._made = 0
        self.problem: ResilError | None = None
        self.wrong = 0

    def run(self) -> Verdict:
        """Move everything. Collective."""
        size = self._manifest.block_bytes
        self._meter.begin("fetch", sum(piece.stop - piece.first for piece in self._pieces) * size)
        readers = len({piece.reader for piece in self._pieces})
        verdict = Verdict()
        with ThreadPoolExecutor(1, "staging") as writer, contextlib.closing(self._reads()) as reads:
            for number, piece in enumerate(self._pieces):
                if number and number % (readers * _ROUND) == 0:
                    self._settle(writer)
                    faults.point("fetch.round")
                    verdict = self._agree()
                    if verdict.asked or verdict.slow:
                        break
                if self._comm.rank == piece.reader:
                    self._send(piece, reads, writer)
                elif self._comm.rank in piece.takers:
                    self._receive(piece, writer)
                self._meter.further((piece.stop - piece.first) * size)
            self._settle(writer)
        return verdict

    def _reads(self) -> Generator[Bytes, None, None]:
        mine = [piece for piece in self._pieces if piece.reader == self._comm.rank]
        memory = [self._memory() for _ in range(min(len(mine), _OWN_UNDER_WAY + 1))]

        def job(number: int) -> Callable[[], Bytes]:
            return lambda: self._source.read(mine[number], memory[number % len(memory)])

        yield from ahead(job(number) for number in range(len(mine)))

    def _memory(self) -> Bytes:
        size = self._manifest.block_bytes
        return buffer(max(1, READ_BYTES // size) * size)

    def _send(self, piece: Piece, reads: Iterator[Bytes], writer: ThreadPoolExecutor) -> None:
        # the memory of the piece before the last one is read into again
        while sum(one.piece.reader == self._comm.rank for one in self._under_way) >= _OWN_UNDER_WAY:
            self._complete(writer)
        data = next(reads)
        moving = _Moving(piece, data, data.size)
        moving.transfers = [self._comm.isend(moving.data, other) for other in piece.others]
        if self._comm.rank in piece.takers:
            moving.written = writer.submit(self._write, piece, moving.data)
        self._under_way.append(moving)

    def _receive(self, piece: Piece, writer: ThreadPoolExecutor) -> None:
        while len(self._under_way) >= _UNDER_WAY:
            self._complete(writer)
        size = self._manifest.block_bytes
        nbytes = min(piece.stop * size, self._manifest.file_bytes) - piece.first * size
        moving = _Moving(piece, self._lend(), nbytes)
        moving.transfers = [self._comm.irecv(moving.data, piece.reader)]
        self._under_way.append(moving)

    def _lend(self) -> Bytes:
        """Memory for a piece that arrives."""
        if self._made < _MEMORIES and not (self._lent and self._lent[0][1].done()):
            self._made += 1
            return self._memory()
        memory, written = self._lent.popleft()
        written.result()
        return memory

    def _complete(self, writer: ThreadPoolExecutor) -> None:
        """Wait for the oldest that is on its way."""
        moving = self._under_way.popleft()
        for transfer in moving.transfers:
            transfer.wait()
        if moving.piece.reader != self._comm.rank:
            self._lent.append((moving.memory, writer.submit(self._write, moving.piece, moving.data)))
        elif moving.written is not None:
            moving.written.result()

    def _settle(self, writer: ThreadPoolExecutor) -> None:
        """Wait for everything."""
        while self._under_way:
            self._complete(writer)
        for _, written in self._lent:
            written.result()

    def _write(self, piece: Piece, data: Bytes) -> None:
        """Thread."""
        if self._staging is None or self.problem is not None:
            return
        size = self._manifest.block_bytes
        try:
            for index in range(piece.first, piece.stop):
                at = (index - piece.first) * size
                self.wrong += not self._staging.write(index, data[at : at + size])
        except OSError as error:
            self.problem = from_os_error(error, "staging")

    def _agree(self) -> Verdict:
        """See whether to go on. Collective."""
        source, now = self._source, time.monotonic()
        said = allgather_json(self._comm, [self._stop(), source.read_bytes, source.busy_s, self._waited_for()])
        asked = any(one[0] for one in said)
        if any(one[3] for one in said) and self._since > now:
            self._since = now
            source.hurries = True
        rates = [one[1] / one[2] if one[2] > 0 else 0.0 for one in said]
        known = [rate for rate in rates if rate]
        usual = sum(known) / max(len(known), 1)
        size = self._manifest.block_bytes
        alone_s = max(blocks * size / (rate or usual or 1.0) for blocks, rate in zip(self._alone, rates, strict=True))
        late = self._comm.max(int(now - self._since > alone_s + GRACE_S))
        return Verdict(asked=asked, slow=bool(late))
