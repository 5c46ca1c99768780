"""Brings what is written to storage, and then into the journal, while the writing goes on.

A thread syncs all the time; what it is through with counts as written down as soon as rank 0, in a thread too, has put
it into the journal. A mover that is killed loses what lies between: a few parts in a hundred at most, for the writing
waits where the sync is further behind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from slurm_resil.comm.base import Communicator, agreed
from slurm_resil.core import faults
from slurm_resil.drain.claims import Claims
from slurm_resil.drain.lease import Lease
from slurm_resil.drain.part import Part
from slurm_resil.drain.storage import write_out

SYNC_BYTES = 1 << 20  # of all movers, the least between two entries of the journal
SYNCS = 192  # entries, about
_BEHIND = 2  # entries that the sync, and the journal, may be behind
_SYNC_S = 5.0


class Journaling:
    """See the module. Use as a context manager: it ends when its threads are through.

    Args:
        comm: Movers.
        part: The file and its journal; rank 0 alone uses it.
        fd: The file, open.
        lease: Rank 0's lease, looked at before the journal grows.
        total_bytes: Bytes of all movers.
        storage: Watches a block that waits for storage, see Meter.

    Attributes:
        journaled: Bytes that the journal has gained; rank 0 alone knows.
    """

    def __init__(
        self,
        comm: Communicator,
        part: Part,
        fd: int,
        lease: Lease | None,
        total_bytes: int,
        *,
        storage: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._storage = storage
        self._comm, self._part, self._fd, self._lease = comm, part, fd, lease
        self._least = max(SYNC_BYTES, total_bytes // SYNCS)
        self._pool = ThreadPoolExecutor(2, "sync")
        self._written: list[Claims] = []  # since the sync that runs has begun
        self._in_sync: list[Claims] = []
        self._synced: list[Claims] = []  # and not in the journal
        self._behind = 0  # bytes of the first two
        self._syncing: Future[None] | None = None
        self._noting: Future[None] | None = None
        self._told, self._told_at = 0, time.monotonic()
        self.journaled = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def wrote(self, claims: Claims) -> None:
        """Hear what this mover has written.

        Raises:
            ResilError: The lease is lost.
            OSError: A sync or the journal was refused; what was not in the journal by then never will be.
        """
        self._written.append(claims)
        self._behind += claims.nbytes
        if self._noting is not None and self._noting.done():
            self._end_note()
        far = self._behind * self._comm.size > _BEHIND * self._least
        if self._syncing is not None and (far or self._syncing.done()):
            self._end_sync()
        if self._syncing is None:
            self._in_sync, self._written = self._written, []
            self._syncing = self._pool.submit(write_out, self._fd)

    def due(self, done: int) -> bool:
        """Whether the journal should grow; rank 0's word counts.

        Args:
            done: Bytes that all movers have done.
        """
        now = time.monotonic()
        if self._noting is not None and not self._noting.done() and done - self._told < _BEHIND * self._least:
            return False
        if done - self._told < self._least and (done == self._told or now - self._told_at < _SYNC_S):
            return False
        self._told, self._told_at = done, now
        return True

    def grow(self) -> None:
        """Give rank 0 what was synced, which writes it down. Collective; never raises on one rank alone."""
        rows = json.dumps(Claims.union(self._synced).pack()).encode()
        self._synced = []
        sent = self._comm.exchange([rows if rank == 0 else b"" for rank in range(self._comm.size)])
        if self._comm.rank == 0:
            claims = Claims.union(Claims.unpack(json.loads(part)) for part in sent)
            if self._noting is None or self._noting.exception() is None:  # else the next call that may raise tells
                self._noting = self._pool.submit(self._note, claims)

    def finish(self, sync: Callable[[], None]) -> None:
        """Sync and write down everything. Collective.

        Args:
            sync: Syncs the file, on all ranks.

        Raises:
            ResilError: The same on every rank.
        """
        with agreed(self._comm, f"syncing {self._part.path}"):
            with self._storage(f"syncing {self._part.path}"):
                sync()
            if self._syncing is not None:
                self._end_sync()
            self._synced, self._written, self._behind = self._synced + self._written, [], 0
        with agreed(self._comm, f"writing the journal of {self._part.path}"):
            self._end_note()
        self.grow()
        with agreed(self._comm, f"writing the journal of {self._part.path}"):
            self._end_note()

    def _end_sync(self) -> None:
        assert self._syncing is not None
        done, self._in_sync = self._in_sync, []
        self._behind -= sum(claims.nbytes for claims in done)
        running, self._syncing = self._syncing, None
        with self._storage(f"syncing {self._part.path}"):
            running.result()
        self._synced += done

    def _end_note(self) -> None:
        running, self._noting = self._noting, None
        if running is not None:
            with self._storage(f"writing the journal of {self._part.path}"):
                running.result()

    def _note(self, claims: Claims) -> None:
        faults.point("drain.sync")
        if self._lease is not None:
            self._lease.check()
        if claims.starts.size:
            self._part.add(claims)
            self.journaled += claims.nbytes
