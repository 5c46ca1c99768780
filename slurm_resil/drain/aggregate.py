"""Two-phase writing of our own: movers that hold interleaved parts of a window exchange them, then each writes a piece.

ROMIO's two-phase method handles narrow runs one by one; here runs at equal distances are moved in one go (see
:mod:`slurm_resil.drain.strided`), which is several times as fast (measured: ``slurm-resil bench drain``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from slurm_resil.comm.base import Bytes, Communicator, Int64s, Runs
from slurm_resil.core.errors import ResilError
from slurm_resil.drain import strided
from slurm_resil.drain.ahead import buffer
from slurm_resil.drain.interleaved import Span
from slurm_resil.drain.strided import Group

_WORD = 8


class Gatherer:
    """Puts narrow runs of all movers together. Its buffers are used again by each call.

    Args:
        comm: Movers.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._sent = self._got = self._out = np.empty(0, np.uint8)

    def gather(self, data: Bytes, runs: Runs, domains: Sequence[Sequence[Span]]) -> tuple[Bytes, Runs]:
        """Send each rank what lies in its domain. Collective.

        Args:
            data: Buffer.
            runs: What of it goes where; no run overlaps another one, of any rank.
            domains: For each rank the ranges of the file that it writes, the same on all ranks.

        Returns:
            Bytes that this rank has to write, and where they go.

        Raises:
            ResilError: Something else came than was sent: a fault of the program.
        """
        runs = runs.merged()
        me = self._comm.rank
        starts = np.array([begin for begin, _ in domains[me]], np.int64)
        length = np.array([end - begin for begin, end in domains[me]], np.int64)
        whole = Runs(source=np.cumsum(length) - length, target=starts, length=length)
        self._out = _room(self._out, whole.nbytes)
        inside = [[clip(runs, begin, end) for begin, end in domain] for domain in domains]
        places: list[Group] = []
        for part in inside[me]:  # what stays here is not sent
            self._keep(data, part, whole, places)
        counts = self._pack(data, [[] if rank == me else parts for rank, parts in enumerate(inside)])
        for message in self._trade(counts):
            for (begin, step, count, each), packed in _unpack(message):
                group = _place(whole, begin), step, count, each
                strided.scatter(self._out, packed, group)
                places.append(group)
        out = self._out[: whole.nbytes]
        return out, whole if sum(one[2] * one[3] for one in places) == whole.nbytes else _there(places, whole)

    def _keep(self, data: Bytes, part: Runs, whole: Runs, places: list[Group]) -> None:
        at = 0
        for begin, step, count, each in strided.groups(part.target, part.length):
            group = _place(whole, begin), step, count, each
            some = slice(at, at + count)
            strided.scatter(self._out, strided.gather(data, part.source[some], part.length[some]), group)
            places.append(group)
            at += count

    def _pack(self, data: Bytes, inside: Sequence[Sequence[Runs]]) -> list[int]:
        """Messages, one after the other: number of groups, the groups (places in the file), the bytes; their sizes."""
        heads: list[Int64s] = []
        for parts in inside:
            groups = [group for part in parts for group in strided.groups(part.target, part.length)]
            heads.append(np.array([len(groups), *(number for group in groups for number in group)], np.int64))
        nbytes = [sum(part.nbytes for part in parts) for parts in inside]
        counts = [
            head.nbytes + -(-size // _WORD) * _WORD if size else 0 for head, size in zip(heads, nbytes, strict=True)
        ]
        self._sent = _room(self._sent, sum(counts))
        begin = 0
        for parts, head, size in zip(inside, heads, counts, strict=True):
            at = begin + head.nbytes
            if size:
                self._sent[begin:at] = head.view(np.uint8)
            for part in parts:
                strided.gather(data, part.source, part.length, self._sent[at : at + part.nbytes])
                at += part.nbytes
            begin += size
        return counts

    def _trade(self, counts: Sequence[int]) -> Iterator[Bytes]:
        """Send each rank its message; gives those that come, by rank."""
        comm = self._comm
        sizes = comm.swap(counts)
        self._got = _room(self._got, sum(sizes))
        ends, places = np.cumsum(counts), np.cumsum(sizes)
        coming, sending = {}, []
        for turn in range(1, comm.size):
            source, to = (comm.rank - turn) % comm.size, (comm.rank + turn) % comm.size
            if sizes[source]:
                into = self._got[places[source] - sizes[source] : places[source]]
                coming[source] = into, comm.irecv(into, source)
            if counts[to]:
                sending.append(comm.isend(self._sent[ends[to] - counts[to] : ends[to]], to))
        for into, transfer in coming.values():
            transfer.wait()
            yield into
        for one in sending:
            one.wait()


def _unpack(message: Bytes) -> Iterator[tuple[Group, Bytes]]:
    if not message.size:
        return
    count = int(message[:_WORD].view(np.int64)[0])
    at = _WORD * (1 + 4 * count)
    rows = message[_WORD:at].view(np.int64).reshape(-1, 4).tolist()
    for begin, step, number, each in rows:
        yield (begin, step, number, each), message[at : at + number * each]
        at += number * each
    if -(-at // _WORD) * _WORD != message.size:
        raise ResilError(f"a mover has sent {message.size} bytes in place of {at}")


def _room(memory: Bytes, nbytes: int) -> Bytes:
    return memory if memory.size >= nbytes else buffer(nbytes)


def _place(whole: Runs, at: int) -> int:
    """Where a byte of the file lies in the buffer of what is written."""
    index = int(np.searchsorted(whole.target, at, "right")) - 1
    return int(whole.source[index]) + at - int(whole.target[index])


def clip(runs: Runs, begin: int, end: int) -> Runs:
    """What of runs that are in order in the file lies in a range of it."""
    first = int(np.searchsorted(runs.target + runs.length, begin, "right"))
    last = int(np.searchsorted(runs.target, end, "left"))
    if first >= last:
        none = np.empty(0, np.int64)
        return Runs(source=none, target=none, length=none)
    source, target, length = (part[first:last].copy() for part in (runs.source, runs.target, runs.length))
    skip = max(begin - int(target[0]), 0)
    source[0] += skip
    target[0] += skip
    length[0] -= skip
    length[-1] -= max(int(target[-1] + length[-1]) - end, 0)
    return Runs(source=source, target=target, length=length)


def _there(places: Sequence[Group], whole: Runs) -> Runs:
    """Runs of what came, if not everything did; the groups are places in the buffer."""
    none = np.empty(0, np.int64)
    source = np.concatenate([none, *(g[0] + g[1] * np.arange(g[2], dtype=np.int64) for g in places)])
    length = np.concatenate([none, *(np.full(g[2], g[3], np.int64) for g in places)])
    place = np.searchsorted(whole.source, source, "right") - 1
    return Runs(source=source, target=whole.target[place] + source - whole.source[place], length=length).merged()
