"""The late drain: what a job that is gone has left on its nodes becomes durable, each node for itself.

No communicator and no launcher: every node that has shards runs one process, they come and go as they like, and what
they tell each other lies in the run's directory, see :mod:`slurm_resil.drain.heads`. The layout of the file is a pure
function of the shards, so that each node writes its own part into the same unpublished file, by plain writes; what was
written is in the same journal that other drains use, and they may go on from it, as this one does from theirs. The file
is read back in shares; whoever has the lease when everything is there publishes it, once. A process that dies is
started again and goes on where it was.

A node that does not come, or stands still, is waited for a bounded time. What is complete without it becomes durable;
if nothing is, the others leave everything where it is, and say why.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from slurm_resil.comm.base import agreed, stopped
from slurm_resil.comm.local import LocalCommunicator
from slurm_resil.core import faults, paths, pins
from slurm_resil.core.config import RETRY_S
from slurm_resil.core.errors import (
    ConfigError,
    DataError,
    RefusedError,
    ResilError,
    SpaceError,
    StorageError,
    TryAgainError,
)
from slurm_resil.core.progress import Meter, Progress
from slurm_resil.drain import check, find, publishing
from slurm_resil.drain import heads as h
from slurm_resil.drain.choosing import POLL_S, Own, Polls, Work, best, drop, expected_nodes, understand
from slurm_resil.drain.collective import BUFFER_BYTES, VERIFY_STORAGE
from slurm_resil.drain.lease import Lease
from slurm_resil.drain.orders import Inbox, Orders
from slurm_resil.drain.pace import Pace
from slurm_resil.drain.part import Part, Prepared, Skeleton, identity
from slurm_resil.drain.patience import Patience
from slurm_resil.drain.plan import Plan
from slurm_resil.drain.readback import ReadBack
from slurm_resil.drain.shards import Slots
from slurm_resil.drain.storage import NOT_PAST, PAST
from slurm_resil.drain.writing import Writer
from slurm_resil.format import sealed
from slurm_resil.format.manifest import BLOCK_BYTES, DrainedManifest, ShardManifest

WAIT_S = 600.0
_SETTLE_S = 5.0  # where nobody knows which nodes there were

T = TypeVar("T")
Tell = Callable[[str, Mapping[str, object]], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to drain late.

    Attributes:
        buffer_bytes: As for :class:`slurm_resil.drain.collective.Options`; so are the next two and the last one.
        cap_bytes_s: Limit of all nodes together.
        retry_s: Patience with storage that refuses.
        verify: How it is read back.
        wait_s: How long others are waited for that do not get on, seconds.
        stall_s: After what time the reading back of others is done for them, seconds.
        lease_stale_s: Silence after which another's lease is taken over.
    """

    buffer_bytes: int = BUFFER_BYTES
    cap_bytes_s: float | None = None
    retry_s: float = RETRY_S
    verify: str = VERIFY_STORAGE
    wait_s: float = WAIT_S
    stall_s: float = 30.0
    lease_stale_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        manifest: What is durable; None if this node had nothing that is newer.
        written_bytes: What this node has written.
        seconds: Duration.
    """

    manifest: DrainedManifest | None
    written_bytes: int
    seconds: float


class Late:
    """See the module.

    Args:
        own: This node and its job.
        job_dir: Job's directory in the burst buffer.
        skeleton: Makes the empty file.
        options: How.
        stop: Asked between reads and writes, and while waiting.
        progress: Told how far it is.
        tell: Hears of things.

    Attributes:
        newest: Newest iteration of this node's shards.
        waits: For which nodes it waits, in words.
    """

    def __init__(
        self,
        own: Own,
        job_dir: str,
        *,
        skeleton: Skeleton,
        options: Options | None = None,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[Progress], None] = lambda _: None,
        tell: Tell = lambda _name, _fields: None,
    ) -> None:
        self._own, self._job_dir, self._skeleton, self._stop, self._tell = own, job_dir, skeleton, stop, tell
        self._run_dir, self._options = own.run_dir, options or Options()
        self._meter, self._comm = Meter(progress), LocalCommunicator()
        self._patience = Patience(self._options.retry_s)
        self._began = time.monotonic()
        self._written = 0
        self.newest, self.waits = 0, ""

    def run(self) -> Outcome:
        """Do this node's part, and what is left of the others' reading back.

        Raises:
            DataError: The shards do not fit, or storage reads back other bytes than were written.
            TryAgainError: Others are missing, or asked to stop; what was written is gone on with.
            SpaceError: No space.
            StorageError: Storage failed otherwise.
            ConfigError: The run's directory does not exist.
        """
        try:
            os.stat(os.path.join(self._run_dir, "."))
        except (FileNotFoundError, NotADirectoryError) as error:
            words = f"the run's directory {self._run_dir} does not exist"
            raise ConfigError(words, mend="is the file system mounted here?") from error
        with contextlib.ExitStack() as stack:
            before = self._durable()
            with agreed(self._comm, f"reading {self._job_dir}"):
                manifests, flaws = self._sealed(stack, before.iteration if before else 0)
            if not manifests:
                return self._outcome(before)
            self.newest = max(one.iteration for one in manifests)
            with agreed(self._comm, f"writing into {self._run_dir}"):
                board = h.Board(self._run_dir, self._own.job_id, self._own.attempt)
                if board.get(h.FAILED, h.Failed) is not None:
                    board.begin()
                board.put(h.heads_name(self._own.node), h.Heads.of(self._own.node, manifests, flaws))
            faults.point("late.heads")
            try:
                work = self._choose(board, manifests)
                manifest = self._work(stack, board, work) if work else self._durable()
            except ResilError as error:
                if not self._stop():
                    drop(self._own, self.newest, error.message, kept=True)
                raise
        if work is not None and work.iteration < self.newest:
            drop(self._own, self.newest, f"{work.chosen.why}; iteration {work.iteration} is taken instead", kept=True)
        return self._outcome(manifest)

    def _outcome(self, manifest: DrainedManifest | None) -> Outcome:
        if manifest is not None:
            find.mark(self._run_dir, self._job_dir, manifest.iteration)
        return Outcome(manifest=manifest, written_bytes=self._written, seconds=time.monotonic() - self._began)

    def _sealed(self, stack: contextlib.ExitStack, after: int) -> tuple[list[ShardManifest], list[str]]:
        """This node's shards that are newer and whole, pinned; and what is wrong with others."""
        good, flaws = [], []
        for iteration in sorted(sealed.listed(self._job_dir)):
            if iteration <= after:
                continue
            stack.enter_context(pins.hold(self._job_dir, iteration))
            manifests, bad = sealed.load(self._job_dir, iteration)
            flaws += bad
            for one in manifests:
                if one.run_id != self._own.run_id:
                    flaws.append(f"the shard of {one.where}, iteration {iteration}, is of run {one.run_id}")
                    continue
                found = check.manifest_flaws(self._job_dir, one, self._still)
                flaws += found
                good += [] if found else [one]
        if flaws:
            self._tell("damaged", {"flaws": flaws[:8]})
        return good, flaws

    def _durable(self, iteration: int | None = None) -> DrainedManifest | None:
        """The newest durable checkpoint, or one of an iteration."""
        if iteration is not None:
            return find.durable(self._run_dir, iteration)
        with contextlib.suppress(OSError):
            numbers = sorted({n for name in os.listdir(self._run_dir) if (n := paths.parse_drained(name)) is not None})
            for number in reversed(numbers):
                if (manifest := find.durable(self._run_dir, number)) is not None:
                    return manifest
        return None

    def _choose(self, board: h.Board, manifests: Sequence[ShardManifest]) -> Work | None:
        """Wait until the nodes have told what they have, and settle on a checkpoint; None: it is durable already."""
        expected, began, polls = expected_nodes(self._own), time.monotonic(), Polls(self._sleep)
        while True:
            durable = self._durable()
            if durable is not None and durable.iteration >= self.newest:
                board.settle(durable.iteration)  # whoever published has cleared it perhaps before this one came
                return None
            there, waited = board.nodes(), time.monotonic() - began
            chosen = board.get(h.CHOSEN, h.Chosen)
            if chosen is not None and self._own.node in there and set(chosen.nodes) <= there:
                if durable is None or chosen.iteration > durable.iteration:
                    work = understand(self._own, board, chosen, manifests)
                    if work is not None:
                        return work
                board.begin()  # of something that is over
                continue
            late = waited > self._options.wait_s
            if late or (expected <= there and (expected or waited > _SETTLE_S)):
                proposal, why = best(board.heads(), durable.iteration if durable else 0)
                if proposal is not None:
                    faults.point("late.choose")
                    with agreed(self._comm, f"writing into {board.path}"):
                        board.propose(h.CHOSEN, proposal)
                    continue
                if late or expected:
                    missing = sorted(expected - there)
                    gone = f"; {', '.join(missing)} did not come in {waited:.0f} s" if missing else ""
                    raise TryAgainError(f"{why}{gone}", mend="bring the node back, and try again")
            self.waits = f"waiting for {', '.join(sorted(expected - there)) or 'other nodes'}"
            polls.wait()

    # writing

    def _work(self, stack: contextlib.ExitStack, board: h.Board, work: Work) -> DrainedManifest | None:
        self._tell("chosen", {"iteration": work.iteration, "nodes": list(work.chosen.nodes)})
        part = Part(self._run_dir, work.iteration)
        stack.callback(part.close)
        if work.mover < 0:  # all of it lies on others
            self._await(board, work, part, lambda: False, "the others")
            return self._durable(work.iteration)
        slots = Slots(self._job_dir, work.own, work.mover)
        stack.callback(slots.close)
        while True:
            made = self._patiently(lambda: self._write(board, work, part, slots))
            if made is None or not self._await(
                board, work, part, lambda: board.all_written(work.mover, work.movers), "writing"
            ):
                return self._durable(work.iteration)
            if os.path.lexists(os.path.join(board.path, h.written_name(work.mover))):
                break
        return self._patiently(lambda: self._finish(board, work, part, made, slots))

    def _patiently(self, act: Callable[[], T]) -> T:
        """Try again while storage refuses and there is patience left."""
        while True:
            try:
                return act()
            except (SpaceError, StorageError) as error:
                seconds = None if isinstance(error, RefusedError) else self._patience.next(self._written)
                if seconds is None:
                    raise
                self._tell("retry", {"error": error.message, "in_s": seconds})
                self._sleep(seconds)

    def _write(self, board: h.Board, work: Work, part: Part, slots: Slots) -> Prepared | None:
        """Write this node's part; None if somebody else has made the checkpoint durable."""
        with agreed(self._comm, f"making {part.path}"):
            made = self._file(board, work, part)
        if made is None:
            return None
        name = h.written_name(work.mover)
        done = board.get(name, h.Written)
        if done is not None and done.contents == work.chosen.contents:
            return made
        loads = list(work.plan.loads)
        loads.insert(0, loads.pop(work.mover))  # alone it is number 0
        plan = replace(work.plan, loads=tuple(loads))
        orders = Orders(iteration=work.iteration, cap_bytes_s=self._options.cap_bytes_s, finish=True)
        pace = Pace(
            self._comm,
            plan,
            orders=orders,
            inbox=Inbox(board.path, orders),  # not those of the job that is gone
            job_dir=self._job_dir,
            buffer_bytes=self._options.buffer_bytes,
            stop=self._stop,
            heed=lambda _: None,
            meter=self._meter,
        )
        writer = Writer(
            self._comm, plan, slots, part=part, made=made, pace=pace, meter=self._meter, lease=None, stop=self._stop
        )
        try:
            writer.run({})
        finally:
            self._written += writer.written
        with agreed(self._comm, f"reading {part.path} back"):
            self._compare(work, part, made, slots)
            faults.point("late.write")
            board.put(name, h.Written(contents=work.chosen.contents, nbytes=writer.written))
        return made

    def _file(self, board: h.Board, work: Work, part: Part) -> Prepared | None:
        """The unpublished file: another node's, an earlier drain's or a new one; None: it is published."""
        about = identity(work.plan, work.chosen.contents)
        polls = Polls(self._sleep)
        while self._durable(work.iteration) is None:
            made = part.join(about, work.plan)
            if made is not None:
                return made
            with self._lease(work.iteration) as lease:
                if lease is not None:
                    made = part.prepare(about, work.plan, self._skeleton)
                    if made.fresh:
                        board.begin_file()
                    return made
            polls.wait()
        return None

    def _compare(self, work: Work, part: Part, made: Prepared, slots: Slots) -> None:
        """Compare with the slots what only this node can check: items with elements outside of their extents."""
        plan = work.plan
        checks = tuple(index for index in plan.checks if not plan.sources[index].whole)
        if not checks:
            return
        found = self._read_back(replace(plan, checks=checks), part, made, slots, 0, 0)
        if found.wrong:
            names = ", ".join(sorted({plan.targets[target].name for target in found.wrong})[:4])
            raise DataError(f"{part.path} reads back other bytes than were written ({names})")

    # reading back

    def _read_back(self, plan: Plan, part: Part, made: Prepared, slots: Slots, first: int, last: int) -> h.Verified:
        past = self._options.verify == VERIFY_STORAGE
        back = ReadBack(part.path, made.offsets, plan, stop=self._stop, done=self._meter.further, past=past)
        try:
            found = back.check(slots, first, last, BLOCK_BYTES)
            words = back.words
        finally:
            back.close()
        return h.Verified(
            contents="", wrong=tuple(found.wrong), blocks=tuple(found.blocks), frame=found.frame, read_from=words
        )

    def _finish(self, board: h.Board, work: Work, part: Part, made: Prepared, slots: Slots) -> DrainedManifest | None:
        """Read back the own share, then what others leave undone; publish."""
        try:
            with agreed(self._comm, f"reading {part.path} back"):
                frames = publishing.frames(work.plan, part.path, made, work.movers)
                begin = time.monotonic()
                order = [(work.mover + 1 + step) % work.movers for step in range(work.movers)]
                self._meter.begin("verify", made.file_bytes)
                self._verify(board, work, part, made, slots, order[0])
                stall_s = max(self._options.stall_s, 3 * (time.monotonic() - begin))
                until = time.monotonic() + stall_s
                polls = Polls(self._sleep)
                while self._missing(board, work) and time.monotonic() < until:
                    if self._durable(work.iteration) is not None:
                        return self._durable(work.iteration)
                    polls.wait()
                for share in order:
                    if share in self._missing(board, work):
                        self._verify(board, work, part, made, slots, share)
        except ResilError:
            there = self._durable(work.iteration)
            self._failed(board)
            if there is None:
                raise
            return there  # the file has got its name meanwhile
        return self._publish(board, work, part, made, frames)

    def _missing(self, board: h.Board, work: Work) -> set[int]:
        return set(range(work.movers)) - board.counted("verified")

    def _verify(self, board: h.Board, work: Work, part: Part, made: Prepared, slots: Slots, share: int) -> None:
        plan = work.plans.of(share)
        checks = tuple(index for index in plan.checks if plan.sources[index].whole)
        cuts = publishing.cuts(plan, made, work.movers)
        found = self._read_back(replace(plan, checks=checks), part, made, slots, cuts[share], cuts[share + 1])
        faults.point("late.verify")
        board.put(h.verified_name(share), replace(found, contents=work.chosen.contents))

    def _publish(
        self, board: h.Board, work: Work, part: Part, made: Prepared, frames: Sequence[str]
    ) -> DrainedManifest | None:
        polls = Polls(self._sleep)
        while (there := self._durable(work.iteration)) is None:
            self._failed(board)
            with agreed(self._comm, f"publishing iteration {work.iteration}"), self._lease(work.iteration) as lease:
                there = self._durable(work.iteration)
                if lease is not None and there is None:
                    self._publish_as_owner(board, work, part, made, frames, lease)
                    continue
            polls.wait()
        with contextlib.suppress(OSError):
            os.unlink(paths.dropped(self._run_dir, work.iteration))
        board.clear()
        return there

    def _publish_as_owner(
        self, board: h.Board, work: Work, part: Part, made: Prepared, frames: Sequence[str], lease: Lease
    ) -> None:
        shares = [board.get(h.verified_name(share), h.Verified) for share in range(work.movers)]
        good = [one for one in shares if one is not None and one.contents == work.chosen.contents]
        if len(good) < work.movers:
            raise TryAgainError("shares of the reading back are gone", mend="try again")
        wrong = sorted({work.plan.targets[target].name for one in good for target in one.wrong})
        lease.check()
        part.take_back()  # from one who has died between the file's name and its manifest
        if wrong or [one.frame for one in good] != list(frames):
            what = ", ".join(wrong[:4]) or "HDF5's structure"
            words = f"{part.path} reads back other bytes than were written ({what}), the shards are right"
            part.remove()
            board.begin()
            board.put(h.FAILED, h.Failed(words=words))
            raise DataError(words, mend="look at the file system, then drain again")
        seconds = time.monotonic() - self._began
        blocks = [block for one in good for block in one.blocks]
        lease.check()
        self._still()
        publishing.publish(self._run_dir, part, publishing.describe(work.plan, made, blocks, {"drain": seconds}))
        read_from = PAST if all(one.read_from == PAST for one in good) else NOT_PAST
        self._tell("published", {"iteration": work.iteration, "read_from": read_from})

    @contextlib.contextmanager
    def _lease(self, iteration: int) -> Iterator[Lease | None]:
        """The lease of an iteration, or None if another process has it."""
        stale = self._options.lease_stale_s
        more = {} if stale is None else {"stale_s": stale}
        words = f"late drain of job {self._own.job_id} on {self._own.node}"
        try:
            lease = Lease(self._run_dir, iteration, owner=words, stop=self._stop, **more)
        except TryAgainError:
            yield None
            return
        try:
            yield lease
        finally:
            lease.release()

    def _await(self, board: h.Board, work: Work, part: Part, ready: Callable[[], bool], doing: str) -> bool:
        """Wait for the others; False if the checkpoint is durable without us.

        Raises:
            TryAgainError: They do not get on.
            DataError: One of them has found that it is no good.
        """
        seen, since, polls = self._signs(board, part), time.monotonic(), Polls(self._sleep)
        while self._durable(work.iteration) is None:
            self._failed(board)
            if ready():
                return True
            signs = self._signs(board, part)
            if signs != seen:
                seen, since = signs, time.monotonic()
            there = board.counted("written")
            silent = [node for place, node in enumerate(work.chosen.nodes) if place not in there]
            self.waits = f"waiting for {doing} on {', '.join(silent) or 'another node'}"
            if time.monotonic() - since > self._options.wait_s:
                words = (
                    f"iteration {work.iteration}: {self.waits}, which did not get on for {self._options.wait_s:.0f} s"
                )
                raise TryAgainError(words, mend="bring the node back, and try again")
            polls.wait()
        return False

    def _failed(self, board: h.Board) -> None:
        """Raise what another node has found."""
        failed = board.get(h.FAILED, h.Failed)
        if failed is not None:
            raise DataError(failed.words, mend="look at the file system, then drain again")

    def _signs(self, board: h.Board, part: Part) -> object:
        """Changes as long as anybody gets on."""
        size = 0
        with contextlib.suppress(OSError):
            size = os.stat(part.journal).st_size
        return size, len(board.counted("written")), len(board.counted("verified"))

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._still()
            time.sleep(min(left, POLL_S))

    def _still(self, _nbytes: int = 0) -> None:
        if self._stop():
            raise stopped("late drain")
