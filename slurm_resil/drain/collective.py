"""The drain itself: every mover rank calls :func:`drain`, and all return the same or raise the same.

Order: find the shards, plan, lease, skeleton, collective writes, sync, read back, rename, manifest, durable marks. The
file has a temporary name until all of it was read back, and the checkpoint counts only when its manifest is there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from slurm_resil.comm.base import (
    MAX_WRITE_BYTES,
    Bytes,
    Communicator,
    File,
    Runs,
    agree,
    agreed,
    allgather_json,
    bcast_json,
    from_os_error,
    stopped,
)
from slurm_resil.core import faults, fsio, paths
from slurm_resil.core.errors import ConfigError, DataError, ResilError, SpaceError
from slurm_resil.core.log import now_s
from slurm_resil.drain import hints, rounds
from slurm_resil.drain.find import Finder, mark
from slurm_resil.drain.lease import Lease
from slurm_resil.drain.lease import path as lease_path
from slurm_resil.drain.plan import Piece, Plan, Target
from slurm_resil.drain.planning import plan as make
from slurm_resil.drain.readback import ReadBack
from slurm_resil.drain.shards import Slots
from slurm_resil.drain.throttle import Throttle
from slurm_resil.format.manifest import BLOCK_BYTES, DrainedItem, DrainedManifest

BUFFER_BYTES = 64 << 20
_METADATA_BYTES = 1024  # of one dataset in the file, generous

Skeleton = Callable[[str, Plan], Sequence[int | None]]
"""Makes the file at a path with a dataset for each target and returns where the data of each starts."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a drain is. ``phase``: ``write``, ``verify``; bytes of all movers, estimated."""

    phase: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to drain.

    Attributes:
        buffer_bytes: Memory of a mover for data, and the most it writes in one round.
        cap_bytes_s: Limit of all movers together; None: none.
        hints: MPI-IO hints of the site.
        owner: Words for the lease.
        lease_stale_s: Silence after which another's lease is taken over, seconds; None: the default.
    """

    buffer_bytes: int = BUFFER_BYTES
    cap_bytes_s: float | None = None
    hints: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    lease_stale_s: float | None = None

    def __post_init__(self) -> None:
        if not 4096 <= self.buffer_bytes <= MAX_WRITE_BYTES:
            raise ConfigError(
                f"a drain buffer of {self.buffer_bytes} bytes", mend=f"take 4096 to {MAX_WRITE_BYTES} bytes, like 64MiB"
            )
        if self.cap_bytes_s is not None and self.cap_bytes_s <= 0:
            raise ConfigError(f"a bandwidth of {self.cap_bytes_s} bytes/s", mend="take more than 0, or no limit")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a drain came to.

    Attributes:
        manifest: The published manifest.
        already: It was there before; nothing was written.
        seconds: Duration.
    """

    manifest: DrainedManifest
    already: bool
    seconds: float


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

    Raises:
        DataError: A shard is damaged, or the shards do not fit together.
        TryAgainError: Not sealed everywhere, drained by somebody else, or stopped.
        SpaceError: No space, or not writable.
        ConfigError: The run's directory does not exist.
        ResilError: Storage failed otherwise. All the same on every rank; nothing was published then.
    """
    started = time.monotonic()
    job = _Drain(comm, run_dir, job_dir, skeleton, options or Options(), stop, progress)
    job.traces = traces if traces is not None else []
    with agreed(comm, f"looking at {run_dir}"):
        if not os.path.isdir(run_dir):
            raise ConfigError(f"the run's directory {run_dir} does not exist", mend="give the right --run-dir")
    with contextlib.ExitStack() as stack:
        finder = Finder(comm, run_dir, job_dir, stack)
        there = finder.search(iteration)
        if there is not None:
            mark(run_dir, job_dir, there.iteration)
            return Outcome(manifest=there, already=True, seconds=time.monotonic() - started)
        manifest, already = job.run(stack, finder, started)
    mark(run_dir, job_dir, manifest.iteration)
    return Outcome(manifest=manifest, already=already, seconds=time.monotonic() - started)


class _Drain:
    def __init__(
        self,
        comm: Communicator,
        run_dir: str,
        job_dir: str,
        skeleton: Skeleton,
        options: Options,
        stop: Callable[[], bool],
        progress: Callable[[Progress], None],
    ) -> None:
        self.comm, self.run_dir, self.job_dir = comm, run_dir, job_dir
        self.skeleton, self.options, self.stop, self.progress = skeleton, options, stop, progress
        self.offsets: list[int | None] = []
        self.file_bytes = 0
        self.costs: dict[str, float] = {}
        self.traces: list[str] = []

    def run(self, stack: contextlib.ExitStack, finder: Finder, started: float) -> tuple[DrainedManifest, bool]:
        """Plan, write, verify, publish; True if another mover had done it meanwhile."""
        with agreed(self.comm, "opening slots"):
            slots = Slots(self.job_dir, finder.own, self.comm.rank)
            stack.callback(slots.close)
        with self._timed("plan"):
            plan = make(self.comm, slots.heads, slots.items)
        iteration = plan.head.iteration
        lease = None
        with agreed(self.comm, f"taking the lease in {self.run_dir}"):
            if self.comm.rank == 0:
                stale = self.options.lease_stale_s
                more = {} if stale is None else {"stale_s": stale}
                lease = Lease(self.run_dir, iteration, owner=self.options.owner, stop=self.stop, **more)
                stack.callback(lease.release)
                self.traces.append(lease_path(self.run_dir, iteration))
        there = finder.durable(iteration)
        if there is not None:
            return there, True
        temp = paths.drained_part(self.run_dir, iteration)
        if self.comm.rank == 0:
            self.traces.append(temp)
        try:
            with self._timed("skeleton"):
                self._make(plan, temp)
            with self._timed("write"):
                self._write(plan, slots, temp)
            with self._timed("verify"):
                blocks = self._verify(plan, slots, temp)
            self.costs["drain"] = time.monotonic() - started
            return self._publish(plan, lease, temp, iteration, blocks), False
        except ResilError:
            if self.comm.rank == 0:
                with contextlib.suppress(OSError):
                    os.unlink(temp)
            raise

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.costs[name] = time.monotonic() - begin

    def _make(self, plan: Plan, temp: str) -> None:
        """Make the empty file; rank 0."""
        offsets: list[int | None] = []
        size = 0
        with agreed(self.comm, f"making {temp}"):
            if self.comm.rank == 0:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temp)  # of a mover that was killed
                need = plan.nbytes + _METADATA_BYTES * (len(plan.targets) + 8)
                free = os.statvfs(self.run_dir)
                if free.f_bavail * free.f_frsize < need:
                    raise SpaceError(
                        f"{self.run_dir} has {free.f_bavail * free.f_frsize} bytes free, the checkpoint needs {need}",
                        mend="free some space or choose another prefix",
                        path=self.run_dir,
                    )
                offsets = list(self.skeleton(temp, plan))
                size = os.stat(temp).st_size
        self.offsets, self.file_bytes = bcast_json(self.comm, [offsets, size])

    def _write(self, plan: Plan, slots: Slots, temp: str) -> None:
        comm = self.comm
        buffer_bytes, throttle = self._pace(plan)
        own = list(rounds.cut(plan, buffer_bytes))
        count = comm.max(len(own))
        buffer = np.empty(max((sum(p.nbytes for p in one) for one in own), default=0), np.uint8)
        runs = sum(allgather_json(comm, rounds.count_runs(plan)))
        chosen = hints.choose(self.run_dir, runs=runs, nbytes=plan.nbytes, site=self.options.hints)
        with agreed(comm, f"opening {temp}"):
            file = comm.open(temp, chosen)
        try:
            for number in range(count):
                faults.point("drain.round")
                pieces = own[number] if number < len(own) else []
                throttle.take(sum(piece.nbytes for piece in pieces))
                self._round(file, plan, slots, pieces, buffer, temp)
                done = sum(min(load, (number + 1) * buffer_bytes) for load in plan.loads)
                self.progress(Progress(phase="write", done_bytes=done, total_bytes=plan.nbytes))
            with agreed(comm, f"writing {temp}"):
                file.sync()
        finally:
            file.close()
        comm.barrier()

    def _pace(self, plan: Plan) -> tuple[int, Throttle]:
        """Size of a round and throttle: each mover has the part of the cap that it has of the work."""
        size, cap = self.options.buffer_bytes, self.options.cap_bytes_s
        if cap is None:
            return size, Throttle(None, 0)
        total = max(plan.nbytes, 1)
        most = max(plan.loads) / total * cap
        size = max(4096, min(size, int(most)))  # about a second for each round
        rate = max(cap * plan.loads[self.comm.rank] / total, 1.0)
        return size, Throttle(rate, size, stop=self.stop)

    def _round(self, file: File, plan: Plan, slots: Slots, pieces: Sequence[Piece], buffer: Bytes, temp: str) -> None:
        """One collective write. A rank that cannot read takes part with nothing, then all raise."""
        problem: ResilError | None = None
        sources, targets, lengths = [], [], []
        at = 0
        try:
            for piece in pieces:
                source = plan.sources[piece.source]
                base = self.offsets[source.target]
                assert base is not None
                slots.read(source, piece.part, piece.first, piece.last, buffer[at : at + piece.nbytes])
                length = source.runs(piece.part, piece.first, piece.last)
                sources.append(at + np.cumsum(length.length) - length.length)
                targets.append(base + length.target)
                lengths.append(length.length)
                at += piece.nbytes
        except ResilError as error:
            problem = error
        except OSError as error:
            problem = from_os_error(error, "reading slots")
        none = np.empty(0, np.int64)
        work = (sources, targets, lengths) if problem is None and pieces else ([none], [none], [none])
        source_at, target_at, length_of = (np.concatenate(part) for part in work)
        try:
            file.write(buffer, Runs(source=source_at, target=target_at, length=length_of))
        except OSError as error:
            problem = problem or from_os_error(error, f"writing {temp}")
        if agree(self.comm, problem, asked=self.stop()):
            raise stopped("drain")

    def _verify(self, plan: Plan, slots: Slots, temp: str) -> list[str]:
        comm = self.comm
        done = 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes * comm.size
            total = plan.nbytes + self.file_bytes
            self.progress(Progress(phase="verify", done_bytes=min(done, total), total_bytes=total))

        faults.point("drain.verify")
        wrong: list[int] = []
        own: list[str] = []
        with agreed(comm, f"reading {temp} back"):
            back = ReadBack(temp, self.offsets, plan, stop=self.stop, done=count)
            try:
                wrong = back.wrong(slots)
                own = back.blocks(comm.rank, comm.size, self.file_bytes, BLOCK_BYTES)
            finally:
                back.close()
        gathered = allgather_json(comm, {"wrong": wrong, "blocks": own})
        targets = {target for part in gathered for target in part["wrong"]}
        if targets:
            self._blame(plan, slots, targets, temp)
        return [one for part in gathered for one in part["blocks"]]

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
        raise DataError(
            f"{temp} reads back other bytes than were written ({names}), the shards are right",
            mend="look at the file system, then drain again",
        )

    def _publish(
        self, plan: Plan, lease: Lease | None, temp: str, iteration: int, blocks: Sequence[str]
    ) -> DrainedManifest:
        final = paths.drained(self.run_dir, iteration)
        head = plan.head
        manifest = DrainedManifest(
            run_id=head.run_id,
            job_id=head.job_id,
            attempt=head.attempt,
            iteration=iteration,
            world_size=head.world_size,
            file=os.path.basename(final),
            file_bytes=self.file_bytes,
            block_bytes=BLOCK_BYTES,
            blocks=tuple(blocks),
            items=tuple(_item(target, offset) for target, offset in zip(plan.targets, self.offsets, strict=True)),
            written_bytes=plan.loads,
            created_s=now_s(),
            costs_s={name: round(value, 4) for name, value in self.costs.items()},
            metrics=dict(head.metrics),
        )
        with agreed(self.comm, f"publishing {final}"):
            if self.comm.rank == 0:
                assert lease is not None
                lease.check()
                if self.stop():
                    raise stopped("drain")
                fd = os.open(temp, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
                where = paths.drained_manifest(self.run_dir, iteration)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(where)  # of a file that is not whole, see durable()
                faults.point("drain.rename")
                os.replace(temp, final)
                fsio.fsync_dir(self.run_dir)
                faults.point("drain.publish")
                manifest.publish(where, sync=True)
        return DrainedManifest.from_bytes(self.comm.bcast(manifest.to_bytes()), where="the new manifest")


def _item(target: Target, offset: int | None) -> DrainedItem:
    return DrainedItem(
        name=target.name,
        dtype=target.dtype,
        shape=target.shape,
        offset=offset,
        nbytes=target.nbytes,
        rank=target.rank,
    )
