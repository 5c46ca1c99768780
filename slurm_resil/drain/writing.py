"""The collective writes of a drain, in rounds.

While a round is written, the next one is read in a thread, and what was written before is synced in another. What the
movers have to tell each other goes in one step after each round. Interleaved tensors come first, window by window (see
:mod:`slurm_resil.drain.interleaved`), then each mover writes the rest at its own pace. What a drain before this one has
left is compared with the shards as the rounds come to it, and what is equal is not written again.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_resil.comm.base import Bytes, Communicator, File, Runs, agree, agreed, allgather_json, from_os_error, stopped
from slurm_resil.core import faults
from slurm_resil.core.errors import ResilError
from slurm_resil.core.progress import Meter
from slurm_resil.drain import rounds
from slurm_resil.drain.aggregate import Gatherer
from slurm_resil.drain.ahead import ahead, buffer
from slurm_resil.drain.claims import Claims
from slurm_resil.drain.interleaved import Span, Windows, divide
from slurm_resil.drain.journaling import Journaling
from slurm_resil.drain.lease import Lease
from slurm_resil.drain.pace import Pace
from slurm_resil.drain.part import Part, Prepared
from slurm_resil.drain.plan import Piece, Plan
from slurm_resil.drain.shards import READ_BYTES, Slots

_AHEAD = 2  # windows that are agreed on before the first is written: one is written, one read


@dataclass(frozen=True)
class _Data:
    """A round as it was read: bytes, and where they go."""

    buffer: Bytes
    runs: Runs

    @classmethod
    def none(cls) -> _Data:
        none = np.empty(0, np.int64)
        return cls(np.empty(0, np.uint8), Runs(source=none, target=none, length=none))


class Writer:
    """Writes what is missing of one file. Every public method is collective.

    Args:
        comm: Movers.
        plan: Plan.
        slots: This node's shards.
        part: The file and its journal; rank 0 alone uses it.
        made: The file as it was prepared, the same on all ranks.
        pace: How fast.
        meter: Hears how far it is.
        lease: Rank 0's lease, looked at before the journal grows.
        stop: Asked between rounds; True on any rank ends the drain.
        interleaved: Targets that are written window by window, the same on all ranks.
        gathers: What is interleaved is put together here; False: MPI gets it as it is, and its hints decide.

    Attributes:
        written: Bytes that this mover has written.
        kept: Bytes of its share that were there already and right.
        refuted: Bytes that the journal claimed and that were not.
        journaled: Bytes that the journal has gained; rank 0 alone knows.
    """

    def __init__(
        self,
        comm: Communicator,
        plan: Plan,
        slots: Slots,
        *,
        part: Part,
        made: Prepared,
        pace: Pace,
        meter: Meter,
        lease: Lease | None,
        stop: Callable[[], bool],
        interleaved: Sequence[int] = (),
        gathers: bool = True,
    ) -> None:
        self._comm, self._plan, self._slots, self._part, self._made = comm, plan, slots, part, made
        self._pace, self._meter, self._lease, self._stop = pace, meter, lease, stop
        self._gaps = made.claims.gaps()
        self._buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._scratch = np.empty(READ_BYTES if made.claims.starts.size else 0, np.uint8)
        self._fd = -1
        self._windows = Windows(plan, made.offsets, interleaved)
        self._apart = [piece for piece in plan.pieces if plan.sources[piece.source].target not in set(interleaved)]
        self._edges = [self._windows.begin]  # ends of the windows that were agreed on
        self._gatherer = Gatherer(comm) if gathers else None
        self._done = 0
        self._begun = False
        self.written = self.kept = self.refuted = self.journaled = 0

    def run(self, hints: Mapping[str, str]) -> None:
        """Write.

        Raises:
            ResilError: The same on every rank.
        """
        self._meter.begin("write", self._plan.nbytes)
        with self._opened(self._part.path, hints) as file:
            journal = Journaling(
                self._comm, self._part, self._fd, self._lease, self._plan.nbytes, storage=self._meter.storage
            )
            try:
                with journal, contextlib.closing(ahead(self._reads())) as own:
                    self._rounds(file, own, journal)
            finally:
                self.journaled = journal.journaled

    def _rounds(self, file: File, own: Iterator[_Data], journal: Journaling) -> None:
        for _ in range(_AHEAD):
            self._agree_on_edge([self._reach()] if self._comm.size == 1 else allgather_json(self._comm, self._reach()))
        problem, data = self._next(own)
        number = size = skipped = 0
        while self._told(file, journal, [size, skipped], problem, data is not None):
            now = data or _Data.none()
            problem, nbytes = self._round(file, journal, now, self._window(number))
            size, skipped = now.buffer.size, now.buffer.size - nbytes
            number += 1
            refused, data = self._next(own)
            problem = problem or refused
        journal.finish(file.sync)

    @contextlib.contextmanager
    def _opened(self, path: str, hints: Mapping[str, str]) -> Iterator[File]:
        """Open on all ranks. A fault of the program is not waited for in a collective close: the others never come."""
        with agreed(self._comm, f"opening {path}"), self._meter.storage(f"opening {path}"):
            file = self._comm.open(path, hints)
        problem: ResilError | None = None
        try:
            with agreed(self._comm, f"opening {path}"):
                self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            yield file
        except ResilError as error:  # the same on every rank
            problem = error
        finally:
            if self._fd >= 0:
                os.close(self._fd)
        refused: ResilError | None = None
        try:
            with self._meter.storage(f"closing {path}"):
                file.close()
        except OSError as error:
            refused = from_os_error(error, f"closing {path}")
        if problem is not None:
            raise problem
        agree(self._comm, refused)

    def _told(
        self, file: File, journal: Journaling, sums: Sequence[int], problem: ResilError | None, more: bool
    ) -> bool:
        """After a round: how it went on all ranks, what they have done, what is ordered; whether there is more.

        Raises:
            ResilError: Any rank's problem, or asked to stop; the same on every rank.
        """
        comm = self._comm
        orders = [self._pace.wish(), journal.due(self._done)] if comm.rank == 0 else None
        asked = self._begun and self._stop()  # whatever was asked before, one round is gained
        row = [problem is not None, asked, more, *sums, self._reach(), orders]
        rows = allgather_json(comm, row)
        refused, stops, going, sizes, skipped, edges, told = zip(*rows, strict=True)
        if any(refused):
            agree(comm, problem)
        self._done += sum(sizes)
        if sum(sizes):
            self._meter.further(sum(sizes), skipped=sum(skipped))
        if any(stops):
            journal.finish(file.sync)  # so that the next one has the least to do
            raise stopped("drain")
        wish, due = told[0]
        self._pace.follow(wish)
        if due:
            journal.grow()
        self._agree_on_edge(edges)
        return any(going)

    def _reach(self) -> int:
        return self._windows.reach(self._edges[-1], self._pace.round_bytes())

    def _agree_on_edge(self, edges: Sequence[int]) -> None:
        if self._edges[-1] < self._windows.end:
            self._edges.append(min(edges))

    def _window(self, number: int) -> Span | None:
        return (self._edges[number], self._edges[number + 1]) if number + 1 < len(self._edges) else None

    def _reads(self) -> Iterator[Callable[[], _Data]]:
        """What reads the rounds, each into the buffer that the one before it does not use."""
        for number, pieces in enumerate(self._pieces()):
            size = sum(piece.nbytes for piece in pieces)
            if size > self._buffers[number % 2].size:
                self._buffers[number % 2] = buffer(size)
            yield functools.partial(self._read, pieces, self._buffers[number % 2][:size])

    def _pieces(self) -> Iterator[list[Piece]]:
        number = 0
        while (window := self._window(number)) is not None:
            yield self._windows.cut(*window)
            number += 1
        yield from rounds.cut(self._plan, self._apart, self._pace.round_bytes)

    def _next(self, own: Iterator[_Data]) -> tuple[ResilError | None, _Data | None]:
        """What was read for the next round, or why it cannot be; neither at the end."""
        try:
            return None, next(own, None)
        except ResilError as error:
            return error, None
        except OSError as error:
            return from_os_error(error, "reading slots"), None

    def _round(
        self, file: File, journal: Journaling, data: _Data, window: Span | None
    ) -> tuple[ResilError | None, int]:
        """One collective write; returns what is wrong, and the bytes of this mover's share that were missing.

        A rank with a problem takes part with nothing.
        """
        self._begun = True
        problem: ResilError | None = None
        runs = _Data.none().runs
        doing = f"writing {self._part.path}"
        try:
            faults.point("drain.round")
            with self._meter.storage(f"reading {self._part.path}"):
                runs = self._missing(data)
            self._pace.wait(runs.nbytes)
        except ResilError as error:
            problem = error
        except OSError as error:
            problem = from_os_error(error, doing)
        out = data.buffer, runs
        if window is not None and self._gatherer is not None:
            domains = divide(self._windows.within(*window), self._comm.size)
            out = self._gatherer.gather(*out, domains)
        self._comm.barrier()  # whoever may write sooner waits here, not in MPI's write, which burns a core
        try:
            with self._meter.storage(doing):
                faults.point("drain.write")
                file.write(*out)
            self.written += out[1].nbytes
            journal.wrote(Claims.of(out[1].target, out[1].length))
        except ResilError as error:
            problem = problem or error
        except OSError as error:
            problem = problem or from_os_error(error, doing)
        return problem, runs.nbytes

    def _read(self, pieces: Sequence[Piece], out: Bytes) -> _Data:
        """Read pieces into a buffer."""
        none = np.empty(0, np.int64)
        sources, targets, lengths = [none], [none], [none]
        at = 0
        for piece in pieces:
            source = self._plan.sources[piece.source]
            base = self._made.offsets[source.target]
            assert base is not None
            self._slots.read(source, piece.part, piece.first, piece.last, out[at : at + piece.nbytes])
            length = source.runs(piece.part, piece.first, piece.last)
            sources.append(at + np.cumsum(length.length) - length.length)
            targets.append(base + length.target)
            lengths.append(length.length)
            at += piece.nbytes
        runs = Runs(source=np.concatenate(sources), target=np.concatenate(targets), length=np.concatenate(lengths))
        return _Data(out, runs.merged())

    def _missing(self, data: _Data) -> Runs:
        """What of a round is to be written: what the journal does not claim, and what it claims wrongly."""
        claims, runs = self._made.claims, data.runs
        if claims.starts.size == 0:
            return runs
        claimed = claims.cut(runs)
        rows = zip(claimed.source.tolist(), claimed.target.tolist(), claimed.length.tolist(), strict=True)
        wrong = np.array([not self._same(data.buffer, *row) for row in rows], bool)
        rest = self._gaps.cut(runs)
        refuted = int(claimed.length[wrong].sum())
        self.refuted += refuted
        self.kept += claimed.nbytes - refuted
        return Runs(
            source=np.concatenate((rest.source, claimed.source[wrong])),
            target=np.concatenate((rest.target, claimed.target[wrong])),
            length=np.concatenate((rest.length, claimed.length[wrong])),
        )

    def _same(self, data: Bytes, source: int, target: int, length: int) -> bool:
        """Whether the file has at ``target`` what the buffer has at ``source``."""
        for at in range(0, length, self._scratch.size):
            view = self._scratch[: min(self._scratch.size, length - at)]
            got = os.preadv(self._fd, [view.data], target + at)
            if got != view.size or not np.array_equal(view, data[source + at : source + at + got]):
                return False
        return True
