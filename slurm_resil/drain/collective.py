"""The drain itself: every mover rank calls :func:`drain`, and all return the same or raise the same.

Order: find the shards, plan, lease, skeleton, collective writes, sync, read back, rename, manifest, durable marks. The
file has a temporary name until all of it was read back, and the checkpoint counts only when its manifest is there.

A drain that storage refuses is tried again, with longer and longer waits, as long as the budget for that lasts. What it
has written stays, unless it is of no use: the next one goes on from there, whoever and how many its movers are.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slurm_resil.comm.base import (
    MAX_WRITE_BYTES,
    Communicator,
    agree,
    agreed,
    allgather_json,
    bcast_json,
    stopped,
)
from slurm_resil.core import faults, paths
from slurm_resil.core.config import RETRY_S
from slurm_resil.core.errors import ConfigError, DataError, RefusedError, ResilError, SpaceError, StorageError
from slurm_resil.core.hangs import HangWatch
from slurm_resil.core.hangs import Tell as Hangs
from slurm_resil.core.progress import Meter, Progress
from slurm_resil.drain import hints, publishing, rounds, stripes
from slurm_resil.drain.claims import Claims
from slurm_resil.drain.find import Finder, mark
from slurm_resil.drain.interleaved import narrow
from slurm_resil.drain.lease import Lease
from slurm_resil.drain.lease import path as lease_path
from slurm_resil.drain.orders import Inbox, Orders, withdraw
from slurm_resil.drain.pace import Pace
from slurm_resil.drain.part import Part, Prepared, Skeleton, identity
from slurm_resil.drain.patience import Patience
from slurm_resil.drain.plan import Plan
from slurm_resil.drain.planning import plan as make
from slurm_resil.drain.readback import Found, ReadBack
from slurm_resil.drain.shards import Slots
from slurm_resil.drain.storage import NOT_PAST, PAST
from slurm_resil.drain.writing import Writer
from slurm_resil.format.manifest import BLOCK_BYTES, DrainedManifest, ShardManifest

BUFFER_BYTES = 64 << 20
VERIFY_STORAGE, VERIFY_CACHE = "storage", "cache"
_SLICE_S = 0.2

T = TypeVar("T")
Tell = Callable[[str, Mapping[str, object]], None]
"""Hears of what people should know: ``resumed``, ``starts_over``, ``retry``, ``cancelled``, with fields."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to drain.

    Attributes:
        buffer_bytes: Memory of a mover for data, of which a round takes a fifth.
        cap_bytes_s: Limit of all movers together; None: none.
        hints: MPI-IO hints of the site.
        gather: Narrow parts of interleaved tensors are put together before MPI gets them; False: left to its hints.
        retry_s: Seconds of waiting, without getting on meanwhile, after which storage that refuses is given up.
        finish: There is a deadline: no pause while a checkpoint is taken.
        verify: :data:`VERIFY_STORAGE`: read back past the page cache, as far as the system can; :data:`VERIFY_CACHE`:
            through it, which finds what went wrong on the way to the file but not what storage does to it.
        owner: Words for the lease.
        lease_stale_s: Silence after which another's lease is taken over, seconds; None: the default.
    """

    buffer_bytes: int = BUFFER_BYTES
    cap_bytes_s: float | None = None
    hints: Mapping[str, str] = field(default_factory=dict)
    gather: bool = True
    retry_s: float = RETRY_S
    finish: bool = False
    verify: str = VERIFY_STORAGE
    owner: str = ""
    lease_stale_s: float | None = None

    def __post_init__(self) -> None:
        if not 4096 <= self.buffer_bytes <= MAX_WRITE_BYTES:
            raise ConfigError(
                f"a drain buffer of {self.buffer_bytes} bytes", mend=f"take 4096 to {MAX_WRITE_BYTES} bytes, like 64MiB"
            )
        if self.verify not in (VERIFY_STORAGE, VERIFY_CACHE):
            raise ConfigError(f"verify is {self.verify!r}", mend=f"take {VERIFY_STORAGE!r} or {VERIFY_CACHE!r}")
        if self.cap_bytes_s is not None and self.cap_bytes_s <= 0:
            raise ConfigError(f"a bandwidth of {self.cap_bytes_s} bytes/s", mend="take more than 0, or no limit")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a drain came to.

    Attributes:
        manifest: The published manifest.
        already: It was there before; nothing was written.
        seconds: Duration.
        written_bytes: What each mover has written this time; less than its share if an earlier drain had begun.
        read_from: What the bytes that were read back came from, in words: past the page cache or not; empty if nothing
            was read.
    """

    manifest: DrainedManifest
    already: bool
    seconds: float
    written_bytes: tuple[int, ...] = ()
    read_from: str = ""


def drain(
    comm: Communicator,
    *,
    run_dir: str,
    job_dir: str,
    iteration: int | None,
    skeleton: Skeleton,
    options: Options | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[Progress], None] = lambda _: None,
    traces: list[str] | None = None,
    tell: Tell = lambda _name, _fields: None,
    heed: Callable[[Orders], None] = lambda _: None,
    hangs: Hangs = lambda _doing, _seconds, _over: None,
) -> Outcome:
    """Drain one checkpoint. Collective over ``comm``, one rank for each node.

    Args:
        comm: Movers.
        run_dir: Run's directory on the parallel file system, the same for all.
        job_dir: Job's directory in each node's burst buffer.
        iteration: Which; None: the newest that all ranks have sealed.
        skeleton: Makes the empty file; called on rank 0.
        options: How.
        stop: Asked between reads and rounds on every rank; True on any rank ends the drain.
        progress: Told how far it is, on every rank.
        traces: Gets the files that are there only while the drain runs, for whoever ends the process meanwhile.
        tell: Hears of what people should know, on every rank.
        heed: Hears of orders that were given meanwhile, in this thread, on every rank; while the file is read back on
            rank 0 alone.
        hangs: Hears of this rank's calls into storage that take very long, while they last, in a thread of its own.

    Raises:
        DataError: A shard is damaged, or the shards do not fit together.
        TryAgainError: Not sealed everywhere, drained by somebody else, or stopped.
        SpaceError: No space, or not writable.
        StorageError: Storage failed otherwise.
        ConfigError: The run's directory does not exist. All the same on every rank; nothing was published then.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        meter = Meter(progress, watch=stack.enter_context(HangWatch(hangs)))
        job = _Drain(comm, run_dir, job_dir, skeleton, options or Options(), stop, meter, tell, heed)
        job.traces = traces if traces is not None else []
        with agreed(comm, f"looking at {run_dir}"), meter.storage(f"looking at {run_dir}"):
            try:
                os.stat(os.path.join(run_dir, "."))
            except (FileNotFoundError, NotADirectoryError) as error:
                words = f"the run's directory {run_dir} does not exist"
                raise ConfigError(words, mend="give the right --run-dir") from error
        finder = Finder(comm, run_dir, job_dir, stack)
        there = job.patiently(lambda: finder.search(iteration))
        if there is not None:
            mark(run_dir, job_dir, there.iteration)
            return Outcome(manifest=there, already=True, seconds=time.monotonic() - started)
        manifest, already = job.run(stack, finder, started)
    mark(run_dir, job_dir, manifest.iteration)
    written = tuple(allgather_json(comm, job.written))
    seconds = time.monotonic() - started
    return Outcome(manifest=manifest, already=already, seconds=seconds, written_bytes=written, read_from=job.read_from)


class _Drain:
    def __init__(
        self,
        comm: Communicator,
        run_dir: str,
        job_dir: str,
        skeleton: Skeleton,
        options: Options,
        stop: Callable[[], bool],
        meter: Meter,
        tell: Tell,
        heed: Callable[[Orders], None],
    ) -> None:
        self.comm, self.run_dir, self.job_dir = comm, run_dir, job_dir
        self.skeleton, self.options, self.meter = skeleton, options, meter
        self.tell, self.heed, self._asked = tell, heed, stop
        self.inbox: Inbox | None = None  # once it is known what is drained
        self.cancelled = False
        self.patience = Patience(options.retry_s)
        self.costs: dict[str, float] = {}
        self.traces: list[str] = []
        self.written = self.journaled = 0
        self.read_from = ""
        self.frames: list[str] = []  # hashes of HDF5's structure
        self.useful = False  # whether somebody can go on with what there is; rank 0

    def stop(self) -> bool:
        """Whether this rank was asked to end: by a signal, or by an order, which rank 0 looks for."""
        if self.inbox is not None and self.comm.rank == 0 and not self.cancelled and self.inbox.look().cancel:
            self.cancelled = True
            withdraw(self.run_dir)  # it is not for the next one
            self.tell("cancelled", {"iteration": self.inbox.orders.iteration})
        return self.cancelled or self._asked()

    def run(self, stack: contextlib.ExitStack, finder: Finder, started: float) -> tuple[DrainedManifest, bool]:
        """Plan, write, verify, publish; True if another mover had done it meanwhile."""
        with agreed(self.comm, "opening slots"):
            slots = Slots(self.job_dir, finder.own, self.comm.rank)
            stack.callback(slots.close)
        with self._timed("plan"):
            plan = make(self.comm, slots.heads, slots.items)
            contents = self._contents(finder.own)
        self.inbox = Inbox(self.run_dir, self._orders(plan))
        lease = self.patiently(lambda: self._lease(stack, plan.head.iteration))
        part = Part(self.run_dir, plan.head.iteration)
        stack.callback(part.close)
        try:
            return self.patiently(lambda: self._try(plan, slots, part, lease, contents, finder, started))
        except ResilError as error:  # the same on every rank
            if lease is not None and (isinstance(error, DataError) or not self.useful):
                with contextlib.suppress(ResilError, OSError):
                    lease.check()
                    part.remove()
            raise

    def _lease(self, stack: contextlib.ExitStack, iteration: int) -> Lease | None:
        """Take the lease; rank 0."""
        lease = None
        doing = f"taking the lease in {self.run_dir}"
        with agreed(self.comm, doing), self.meter.storage(doing):
            if self.comm.rank == 0:
                stale = self.options.lease_stale_s
                more = {} if stale is None else {"stale_s": stale}
                lease = Lease(self.run_dir, iteration, owner=self.options.owner, stop=self.stop, **more)
                stack.callback(lease.release)
                self.traces.append(lease_path(self.run_dir, iteration))
        return lease

    def _try(
        self,
        plan: Plan,
        slots: Slots,
        part: Part,
        lease: Lease | None,
        contents: str,
        finder: Finder,
        started: float,
    ) -> tuple[DrainedManifest, bool]:
        there = finder.durable(plan.head.iteration)
        if there is not None:
            return there, True
        with self._timed("skeleton"):
            made = self._make(plan, part, lease, contents)
        pace = self._pace(plan)
        with self._timed("write"):
            self._write(plan, slots, part, made, pace, lease)
        with self._timed("verify"):
            blocks = self._verify(plan, slots, part.path, made, pace)
        self.costs["drain"] = time.monotonic() - started
        return self._publish(plan, lease, part, made, blocks), False

    def patiently(self, act: Callable[[], T]) -> T:
        """Do something collective, again and again while storage refuses and there is patience left.

        Raises:
            ResilError: What it ended with; or asked to stop.
        """
        while True:
            try:
                return act()
            except (SpaceError, StorageError) as error:  # the same on every rank
                if isinstance(error, RefusedError):
                    raise
                seconds = bcast_json(self.comm, self.patience.next(self.journaled))
                if seconds is None:
                    raise
                self._wait(error, seconds)

    def _wait(self, error: ResilError, seconds: float) -> None:
        self.tell("retry", {"error": error.message, "in_s": seconds, "left_s": round(self.patience.left_s, 1)})
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop():
            time.sleep(_SLICE_S)
            self.meter.waits(f"storage, after: {error.message}", lost_s=_SLICE_S)
        if agree(self.comm, None, asked=self.stop()):
            raise stopped("drain")

    def _contents(self, own: Sequence[ShardManifest]) -> str:
        """Hash of all seals: another one is of other contents."""
        gathered = allgather_json(self.comm, [[one.rank, publishing.seal(one)] for one in own])
        return publishing.contents((rank, seal) for seals in gathered for rank, seal in seals)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.costs[name] = time.monotonic() - begin

    def _make(self, plan: Plan, part: Part, lease: Lease | None, contents: str) -> Prepared:
        """Make the empty file, or find one to go on with; rank 0."""
        packed: list[Any] = []
        with agreed(self.comm, f"making {part.path}"), self.meter.storage(f"making {part.path}"):
            if lease is not None:
                lease.check()
                stripes.spread(self.run_dir, self.options.hints)
                made = part.prepare(identity(plan, contents), plan, self.skeleton)
                self.useful = made.claims.starts.size > 0
                frames = publishing.frames(plan, part.path, made, self.comm.size)
                packed = [made.offsets, made.file_bytes, made.claims.pack(), made.instead, frames]
        offsets, size, rows, instead, self.frames = bcast_json(self.comm, packed)
        if instead:
            self.tell("starts_over", {"why": instead})
        return Prepared(offsets=tuple(offsets), file_bytes=size, claims=Claims.unpack(rows))

    def _orders(self, plan: Plan) -> Orders:
        cap, finish = self.options.cap_bytes_s, self.options.finish
        return Orders(iteration=plan.head.iteration, cap_bytes_s=cap, finish=finish)

    def _pace(self, plan: Plan) -> Pace:
        assert self.inbox is not None
        return Pace(
            self.comm,
            plan,
            orders=self._orders(plan),
            inbox=self.inbox,
            job_dir=self.job_dir,
            buffer_bytes=self.options.buffer_bytes,
            stop=self.stop,
            heed=self.heed,
            meter=self.meter,
        )

    def _write(self, plan: Plan, slots: Slots, part: Part, made: Prepared, pace: Pace, lease: Lease | None) -> None:
        together = interleaved(self.comm, plan) if self.comm.size > 1 else []
        gathers = self.options.gather
        own = [p for p in plan.pieces if not gathers or plan.sources[p.source].target not in together]
        runs = sum(allgather_json(self.comm, rounds.count_runs(plan, own)))
        chosen = hints.choose(self.run_dir, runs=runs, nbytes=plan.nbytes, site=self.options.hints)
        writer = Writer(
            self.comm,
            plan,
            slots,
            part=part,
            made=made,
            interleaved=together,
            gathers=gathers,
            pace=pace,
            meter=self.meter,
            lease=lease,
            stop=self.stop,
        )
        try:
            writer.run(chosen)
        finally:
            self.written += writer.written
            self.journaled += writer.journaled
            self.useful = self.useful or self.journaled > 0
        if made.claims.starts.size:
            found = allgather_json(self.comm, [writer.kept, writer.refuted])
            kept, refuted = (sum(column) for column in zip(*found, strict=True))
            self.tell("resumed", {"kept_bytes": kept, "refuted_bytes": refuted})

    def _verify(self, plan: Plan, slots: Slots, temp: str, made: Prepared, pace: Pace) -> list[str]:
        comm = self.comm

        def count(nbytes: int) -> None:
            self.meter.further(nbytes * comm.size)
            pace.hear_alone()
            pace.pause()

        self.meter.begin("verify", made.file_bytes)
        found = Found(wrong=[], blocks=[], frame="")
        cuts = publishing.cuts(plan, made, comm.size)
        share = (comm.rank + 1) % comm.size  # with many movers that is what another one wrote
        past = self.options.verify == VERIFY_STORAGE
        with agreed(comm, f"reading {temp} back"), self.meter.storage(f"reading {temp} back"):
            faults.point("drain.verify")
            back = ReadBack(temp, made.offsets, plan, stop=self.stop, done=count, past=past)
            try:
                found = back.check(slots, cuts[share], cuts[share + 1], BLOCK_BYTES)
                self.read_from = back.words
            finally:
                back.close()
        gathered = allgather_json(comm, {**vars(found), "from": self.read_from})
        targets = {target for part in gathered for target in part["wrong"]}
        if targets:
            self._blame(plan, slots, targets, temp)
        order = gathered[-1:] + gathered[:-1]
        if [part["frame"] for part in order] != self.frames:
            raise _changed(temp, "HDF5's structure")
        self.read_from = PAST if all(part["from"] == PAST for part in gathered) else NOT_PAST
        return [one for part in order for one in part["blocks"]]

    def _blame(self, plan: Plan, slots: Slots, targets: Set[int], temp: str) -> None:
        """Find who is wrong: each mover compares its own sources of the targets in question with their seals."""
        flaws: list[str] = []
        with agreed(self.comm, "reading slots again"):
            for index in sorted({piece.source for piece in plan.pieces}):
                source = plan.sources[index]
                if source.target in targets:
                    flaw = slots.flaw(source)
                    flaws += [flaw] if flaw else []
        found = [text for part in allgather_json(self.comm, flaws) for text in part]
        names = ", ".join(sorted({plan.targets[target].name for target in targets})[:4])
        if found:
            raise DataError("; ".join(found[:8]), mend="drain an earlier iteration; this shard is lost")
        raise _changed(temp, names)

    def _publish(
        self, plan: Plan, lease: Lease | None, part: Part, made: Prepared, blocks: Sequence[str]
    ) -> DrainedManifest:
        manifest = publishing.describe(plan, made, blocks, self.costs)
        final = paths.drained(self.run_dir, manifest.iteration)
        with agreed(self.comm, f"publishing {final}"), self.meter.storage(f"publishing {final}"):
            if self.comm.rank == 0:
                assert lease is not None
                lease.check()
                if self.stop():
                    raise stopped("drain")
                publishing.publish(self.run_dir, part, manifest)
        return DrainedManifest.from_bytes(self.comm.bcast(manifest.to_bytes()), where="the new manifest")


def interleaved(comm: Communicator, plan: Plan) -> list[int]:
    """Targets of which any mover has narrow runs, ascending. Collective."""
    return sorted({target for part in allgather_json(comm, narrow(plan)) for target in part})


def _changed(temp: str, what: str) -> DataError:
    return DataError(
        f"{temp} reads back other bytes than were written ({what}), the shards are right",
        mend="look at the file system, then drain again",
    )
