"""Sums of streams over the nodes: the one engine that encodes, rebuilds and copies.

A :class:`Sum` is a stream of bytes on one rank that is put together from streams of other ranks, each times a
coefficient of GF(2^8). All sums of a :class:`Flow` go forward together, one segment at a time. The terms of a sum come
in slots: in each slot every rank reads a segment, sends it to all who need it, receives, adds up and writes, while the
next slot is on its way. So the memory of a rank is a few segments, however large the streams are.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from slurm_resil.comm.base import Bytes, Communicator, Transfer, agree, from_os_error, stopped
from slurm_resil.core.errors import ResilError
from slurm_resil.core.throttle import Throttle
from slurm_resil.redundancy import gf

SEGMENT_BYTES = 4 << 20  # at most: a larger one costs fewer messages for the same bytes
LEAST_BYTES = 1 << 20
BUFFERS_BYTES = 48 << 20  # of a rank, about
AGREE_BYTES = 32 << 20  # read on a rank between two agreements
_UNDER_WAY = 3  # slots: one is worked on while the next ones are on their way


class Source(Protocol):
    """A stream of this rank that is read; segments come in order, each once."""

    def read(self, at: int, buffer: Bytes) -> Bytes:
        """Read as many bytes as a buffer has from a place in the stream; returns it, filled.

        Raises:
            DataError: The bytes are not there.
            OSError: They cannot be read.
        """


class Sink(Protocol):
    """A stream of this rank that is written, in order."""

    def write(self, at: int, data: Bytes) -> None:
        """Take the next bytes.

        Raises:
            OSError: They cannot be written.
        """


@dataclass(frozen=True, kw_only=True)
class Term:
    """A stream of some rank, as a part of a sum.

    Attributes:
        rank: Who reads it.
        stream: Which of that rank's sources.
        nbytes: Its size; it counts as if zeros followed.
        slot: When; terms of a sum are in the order of their slots, no two in one.
        coefficient: What it is multiplied by.
    """

    rank: int
    stream: Hashable
    nbytes: int
    slot: int
    coefficient: int = 1


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A stream that is made.

    Attributes:
        rank: Where.
        sink: Which of that rank's sinks.
        nbytes: Its size, no less than that of any term.
        terms: What it is made of.
        factor: The sum so far is multiplied by this before each next term: 1, 2 or 4.
    """

    rank: int
    sink: Hashable
    nbytes: int
    terms: tuple[Term, ...]
    factor: int = 1


@dataclass
class _Slot:
    """What this rank does in a slot: numbers of sums, with their terms, in the order of the numbers."""

    reads: dict[Hashable, int] = field(default_factory=dict)  # bytes by stream
    sends: list[tuple[int, Term]] = field(default_factory=list)
    adds: list[tuple[int, Term]] = field(default_factory=list)


@dataclass
class _Step:
    """A slot of a round, on its way."""

    slot: _Slot
    at: int
    read: dict[Hashable, Bytes]
    buffers: list[Bytes]
    received: dict[int, Bytes]
    sending: list[Transfer]
    receiving: dict[int, Transfer]


class Flow:
    """Sums that are made together. Collective; each rank names at least those that it takes part in, in one order.

    Args:
        comm: Movers.
        sums: See the class.
        sources: This rank's, by the names in the terms.
        sinks: This rank's, by the names in the sums.
        throttle: Limits what this rank reads.
        stop: Asked on every rank; True on any ends the flow.
        passing: Called before each slot.
        progress: Told the bytes of its own that this rank has read.
    """

    def __init__(
        self,
        comm: Communicator,
        sums: Sequence[Sum],
        sources: Mapping[Hashable, Source],
        sinks: Mapping[Hashable, Sink],
        *,
        throttle: Throttle,
        stop: Callable[[], bool] = lambda: False,
        passing: Callable[[], None] = lambda: None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._comm, self._sums, self._sources, self._sinks = comm, sums, sources, sinks
        self._throttle, self._stop, self._passing, self._progress = throttle, stop, passing, progress
        self._slots = self._plan()
        self._segment = self._agreed_segment()
        self._math = gf.Workspace()
        self._spare: list[Bytes] = []
        self._totals: dict[int, Bytes] = {}  # sums of this rank that are being made, of this round
        self._left: dict[int, int] = {}  # terms that have not come
        self._problem: ResilError | None = None

    def run(self) -> None:
        """Make them.

        Raises:
            TryAgainError: Asked to stop, on any rank.
            ResilError: Something could not be read or written, on any rank; the same on all.
        """
        rounds = self._comm.max(max((-(-one.nbytes // self._segment) for one in self._sums), default=0))
        group = max(1, AGREE_BYTES // (self._segment * max(1, self._comm.max(len(self._slots)))))
        for first in range(0, rounds, group):
            self._some(range(first, min(first + group, rounds)))
            if agree(self._comm, self._problem, asked=self._stop()):
                raise stopped("redundancy")

    def _plan(self) -> list[_Slot]:
        slots: dict[int, _Slot] = {}
        me = self._comm.rank
        for number, one in enumerate(self._sums):
            for term in one.terms:
                if me not in (term.rank, one.rank):
                    continue
                slot = slots.setdefault(term.slot, _Slot())
                if term.rank == me:
                    slot.reads[term.stream] = max(term.nbytes, slot.reads.get(term.stream, 0))
                    if one.rank != me:
                        slot.sends.append((number, term))
                if one.rank == me:
                    slot.adds.append((number, term))
        return [slots[number] for number in sorted(slots)]

    def _agreed_segment(self) -> int:
        """Bytes of a segment, the same on all ranks: as many as fit the memory of the one that needs most."""
        me = self._comm.rank
        widest = max((len(slot.reads) + len(slot.adds) for slot in self._slots), default=0)
        buffers = self._comm.max(_UNDER_WAY * widest + sum(one.rank == me for one in self._sums))
        segment = SEGMENT_BYTES
        while segment > LEAST_BYTES and buffers * segment > BUFFERS_BYTES:
            segment //= 2
        return segment

    def _some(self, rounds: range) -> None:
        under_way: deque[_Step] = deque()
        for number in rounds:
            at = number * self._segment
            for slot in self._slots:
                under_way.append(self._begin(slot, at))
                if len(under_way) == _UNDER_WAY:
                    self._finish(under_way.popleft())
        while under_way:
            self._finish(under_way.popleft())

    def _begin(self, slot: _Slot, at: int) -> _Step:
        step = _Step(slot, at, {}, [], {}, [], {})
        for number, term in slot.adds:
            size = self._here(term.nbytes, at)
            if size and term.rank != self._comm.rank:
                step.received[number] = buffer = self._buffer()
                step.receiving[number] = self._comm.irecv(buffer[:size], term.rank)
        for size, stream in self._reads(slot, at):
            buffer = self._buffer()
            step.buffers.append(buffer)
            step.read[stream] = buffer[:size]
            self._throttle.take(size)
            with self._kept():
                self._passing()
                step.read[stream] = self._sources[stream].read(at, buffer[:size])
            self._progress(size)
        for number, term in slot.sends:
            size = self._here(term.nbytes, at)
            if size:
                step.sending.append(self._comm.isend(step.read[term.stream][:size], self._sums[number].rank))
        return step

    def _reads(self, slot: _Slot, at: int) -> Iterator[tuple[int, Hashable]]:
        """Streams to read, each as far as any of its sums needs it."""
        for stream, nbytes in slot.reads.items():
            size = self._here(nbytes, at)
            if size:
                yield size, stream

    def _finish(self, step: _Step) -> None:
        for number, term in step.slot.adds:
            if self._here(self._sums[number].nbytes, step.at):
                self._add(step, number, term)
        for sending in step.sending:
            sending.wait()
        self._spare += step.buffers

    def _add(self, step: _Step, number: int, term: Term) -> None:
        """Add a term to its sum, and write the sum if it was the last one."""
        one = self._sums[number]
        size, whole = self._here(term.nbytes, step.at), self._here(one.nbytes, step.at)
        total = self._totals.get(number)
        if total is not None and one.factor != 1:
            self._math.double(total[: gf.round_up(whole)], one.factor)
        if size:
            piece = step.received.get(number)
            if piece is not None:
                step.receiving[number].wait()
            else:
                piece = self._buffer()
                piece[:size] = step.read[term.stream][:size]
            piece[size : gf.round_up(whole if total is None else size)] = 0
            if total is None:
                self._totals[number] = total = piece
                self._math.scale(total[: gf.round_up(size)], term.coefficient)
            else:
                used = gf.round_up(size)
                self._math.add(total[:used], piece[:used], term.coefficient)
                self._spare.append(piece)
        self._left[number] = self._left.get(number, len(one.terms)) - 1
        if not self._left[number]:
            del self._left[number]
            total = self._totals.pop(number, None)
            if total is None:
                total = self._buffer()
                total[:whole] = 0
            with self._kept():
                self._sinks[one.sink].write(step.at, total[:whole])
            self._spare.append(total)

    def _buffer(self) -> Bytes:
        return self._spare.pop() if self._spare else np.zeros(self._segment, np.uint8)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep the first error of the block: this rank goes on sending, or the others would wait for ever."""
        try:
            yield
        except ResilError as error:
            self._problem = self._problem or error
        except OSError as error:
            self._problem = self._problem or from_os_error(error, "moving shards between nodes")

    def _here(self, nbytes: int, at: int) -> int:
        """Bytes of a stream in the segment that begins at ``at``."""
        return max(0, min(self._segment, nbytes - at))
