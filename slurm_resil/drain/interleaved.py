"""Tensors whose parts lie interleaved in the file, cut into windows of it that all movers are in together. Pure.

A tensor that is sharded by columns is narrow runs on every node. What the movers have of one window is exchanged, so
that each writes one wide piece of it, see :mod:`slurm_resil.drain.aggregate`. For that all must be in the same place of
the file at a time, however different their shares are: they agree on each window's end, which is as far as the one with
the most can go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_resil.drain.plan import Piece, Plan
from slurm_resil.drain.rounds import MAX_RUNS

WIDE_BYTES = 256 << 10  # runs of this mean size are written as they are: the exchange would cost more than it saves
_PAGE_BYTES = 4096
_FEW = 8  # a part is cut no coarser than into so many

Span = tuple[int, int]
"""First byte in the file, and the byte after the last one."""


def narrow(plan: Plan) -> list[int]:
    """Targets of which this mover has narrow runs."""
    found = {
        plan.sources[piece.source].target
        for piece in plan.pieces
        if plan.sources[piece.source].run_bytes(piece.part) < min(WIDE_BYTES, piece.nbytes)
    }
    return sorted(found)


@dataclass(frozen=True)
class _Placed:
    """A piece and its place in the file."""

    piece: Piece
    begin: int
    end: int


class Windows:
    """This mover's pieces of interleaved targets.

    Args:
        plan: Plan.
        offsets: First byte of the data of each target.
        targets: Those that are interleaved, the same for all movers, ascending.

    Attributes:
        spans: Where these lie in the file, in order.
    """

    def __init__(self, plan: Plan, offsets: Sequence[int | None], targets: Sequence[int]) -> None:
        self._plan = plan
        self._offsets = offsets
        ordered = sorted((offset, target) for target in targets if (offset := offsets[target]) is not None)
        self.spans: list[Span] = [(offset, offset + plan.targets[target].nbytes) for offset, target in ordered]
        self._place = {target: number for number, (_, target) in enumerate(ordered)}
        self._pieces: list[list[_Placed]] = [[] for _ in ordered]
        for piece in plan.pieces:
            source = plan.sources[piece.source]
            if source.target in self._place:
                begin, end = (self._file_place(piece, at) for at in (piece.first, piece.last - 1))
                self._pieces[self._place[source.target]].append(_Placed(piece, begin, end + 1))

    @property
    def begin(self) -> int:
        """First byte of all."""
        return self.spans[0][0] if self.spans else 0

    @property
    def end(self) -> int:
        """Byte after the last one."""
        return self.spans[-1][1] if self.spans else 0

    def reach(self, begin: int, room: int, runs: int = MAX_RUNS) -> int:
        """How far this mover can go from a place in the file.

        Args:
            begin: Place, where a window begins.
            room: Most bytes of its own.
            runs: Most contiguous ranges of its own, about.

        Returns:
            Where the window may end: at a page, or at the end of all.
        """
        for (first, last), pieces in zip(self.spans, self._pieces, strict=True):
            if last <= begin:
                continue
            here = max(begin, first)
            nbytes, count = self._amount(pieces, here, last)
            if nbytes <= room and count <= runs:
                room, runs = room - nbytes, runs - count
                continue
            low, high = here, last  # a window up to low fits, one up to high does not
            while high - low > _PAGE_BYTES:
                middle = (low + high) // 2
                nbytes, count = self._amount(pieces, here, middle)
                low, high = (middle, high) if nbytes <= room and count <= runs else (low, middle)
            end = low // _PAGE_BYTES * _PAGE_BYTES
            return end if end > begin else min(begin // _PAGE_BYTES * _PAGE_BYTES + _PAGE_BYTES, self.end)
        return self.end

    def cut(self, begin: int, end: int) -> list[Piece]:
        """This mover's pieces of a window."""
        found = []
        for (first, last), pieces in zip(self.spans, self._pieces, strict=True):
            if first >= end:
                break
            if last > begin:
                found += [part for one in pieces if (part := self._part(one, begin, end)) is not None]
        return found

    def within(self, begin: int, end: int) -> list[Span]:
        """What of a window belongs to interleaved targets."""
        return [(max(a, begin), min(b, end)) for a, b in self.spans if a < end and b > begin]

    def _amount(self, pieces: Sequence[_Placed], begin: int, end: int) -> tuple[int, int]:
        nbytes = count = 0
        for one in pieces:
            part = self._part(one, begin, end)
            if part is not None:
                nbytes += part.nbytes
                count += -(-part.nbytes // self._plan.sources[part.source].run_bytes(part.part))
        return nbytes, count

    def _part(self, one: _Placed, begin: int, end: int) -> Piece | None:
        if one.begin >= end or one.end <= begin:
            return None
        piece = one.piece
        source = self._plan.sources[piece.source]
        base = self._offsets[source.target] or 0
        first, last = (min(max(source.before(piece.part, at - base), piece.first), piece.last) for at in (begin, end))
        return replace(piece, first=first, last=last) if first < last else None

    def _file_place(self, piece: Piece, at: int) -> int:
        source = self._plan.sources[piece.source]
        return (self._offsets[source.target] or 0) + int(source.runs(piece.part, at, at + 1).target[0])


def divide(spans: Sequence[Span], count: int) -> list[list[Span]]:
    """Divide ranges in order into parts of about the same size, cut at pages of the file if they are many."""
    total = sum(end - begin for begin, end in spans)
    grain = min(_PAGE_BYTES, 1 << max(total // count // _FEW, 1).bit_length() - 1)
    parts: list[list[Span]] = [[] for _ in range(count)]
    before = 0
    for begin, end in spans:
        at = begin
        for number in range(count):
            cut = begin + total * (number + 1) // count - before  # where this part ends, if that is in this range
            cut = end if number + 1 == count else min(max(-(-cut // grain) * grain, at), end)
            if at < cut:
                parts[number].append((at, cut))
                at = cut
        before += end - begin
    return parts
