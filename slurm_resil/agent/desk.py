"""Where the ranks of a node are served: slots, seals, what to restore. Used by the agent's main thread only."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from slurm_resil.agent import protocol as p
from slurm_resil.agent.keeping import Keeping
from slurm_resil.agent.slots import Slots, parse
from slurm_resil.agent.store import Store
from slurm_resil.agent.survey import SHARDS
from slurm_resil.comm.channel import Channel, ChannelClosedError
from slurm_resil.core import control, faults, pins
from slurm_resil.core.errors import DataError, ResilError
from slurm_resil.core.log import event
from slurm_resil.core.model import RunInfo
from slurm_resil.format import draft as drafts
from slurm_resil.format import staged
from slurm_resil.format.manifest import ShardManifest
from slurm_resil.format.world import fit

SEALERS = 2  # threads that hash
NICENESS = 10
TIGHT_SLOTS = 2  # the newest complete and the newest protected iteration hold all of them
PREPARING_S = 4.0  # that a rank which will not wait for a slot waits for one that is being laid out
log = logging.getLogger(__name__)


@dataclass
class Preparing:
    """Slots of a rank that are laid out ahead, one after the other: those that nobody has begun stay free."""

    layout: str
    done: list[int] = field(default_factory=list)


@dataclass
class Rank:
    """One rank of the node."""

    rank: int
    slots: Slots
    descriptions: drafts.Descriptions
    channel: Channel | None = None
    left: bool = False
    outcome: p.Loaded | None = None
    lease: tuple[p.Lease, float] | None = None  # and until when it waits
    sealing: dict[int, Future[ShardManifest]] = field(default_factory=dict)
    preparing: Preparing | None = None
    results: dict[int, p.Message] = field(default_factory=dict)  # what the leader was told, to say it again

    def send(self, message: p.Message) -> None:
        """Tell the rank, if it is there."""
        if self.channel is not None:
            with contextlib.suppress(ChannelClosedError):
                self.channel.send(p.to_wire(message), timeout_s=1.0)


class Desk:
    """The ranks of a node.

    Args:
        job_dir: Job's directory in the burst buffer.
        run_id: Run.
        ranks: Their global ranks.
        slots: Slots of each.
        store: Burst buffer.
        tell: Tells the leader.
        later: Runs a call in the main thread.
    """

    def __init__(
        self,
        job_dir: str,
        run_id: str,
        ranks: range,
        slots: int,
        store: Store,
        *,
        tell: Callable[[p.Message], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self._job_dir, self._run_id, self._store, self._tell, self._later = job_dir, run_id, store, tell, later
        self.ranks = {
            rank: Rank(rank, Slots(job_dir, rank, slots, store.forget), drafts.Descriptions(job_dir)) for rank in ranks
        }
        self.cycle = -1
        self.keeping = Keeping()
        self._gone = False  # whether there may be shards of ranks that there are no more
        self._layouts = ThreadPoolExecutor(1, thread_name_prefix="layout", initializer=_be_nice)
        self._pool = ThreadPoolExecutor(SEALERS, thread_name_prefix="seal", initializer=_be_nice)

    # shards

    def begin(self, cycle: int) -> None:
        """Begin a cycle: the ranks of the one before are gone."""
        self.cycle = cycle
        self.keeping.begin()
        for rank in self.ranks.values():
            rank.outcome, rank.lease, rank.left = None, None, False
            rank.results.clear()
            rank.slots.free_unsealed(lambda iteration, rank=rank: iteration in rank.sealing)  # type: ignore[misc] # bound now

    def take_over(self, words: Sequence[int], info: RunInfo) -> None:
        """Go on where an agent before this one ended, by the words of its page and what lies in the burst buffer."""
        self.begin(words[control.CYCLE] - 1)
        self.all_sealed(words[control.SEALED_ALL])
        self.keeping.protected, self.keeping.durable = words[control.PROTECTED], words[control.DURABLE]
        for iteration, rank, attempt in self.survey(
            info.world_size
        ).shards:  # by this it is known which slots hold what
            if attempt == info.attempt and iteration > self.sealed_all:
                # that agent may have had no time to tell the leader, and the rank has been told
                self.ranks[rank].results[iteration] = p.Sealed(iteration=iteration, rank=rank, cycle=self.cycle)

    @property
    def sealed_all(self) -> int:
        """Newest iteration that all ranks of the run have sealed."""
        return self.keeping.sealed_all

    @property
    def sealing(self) -> bool:
        """Whether something is being sealed."""
        return any(rank.sealing for rank in self.ranks.values())

    def survey(self, world_size: int) -> p.Survey:
        """List the sealed shards that can be restored here; take out what is damaged."""
        found = []
        passed_over: list[tuple[int, int, str]] = []
        whole: list[int] = []
        for iteration, by_rank in self._store.sealed().items():
            others: list[tuple[int, str, ShardManifest]] = []
            for owner, path in by_rank.items():
                if owner not in self.ranks:
                    self._gone |= len(self.ranks) == world_size
                    continue  # of a rank that is placed elsewhere now, or that there is no more
                try:
                    manifest = self._load(path, iteration, owner)
                except FileNotFoundError:
                    continue
                except DataError as error:
                    words = f"is damaged: {error.message}; {self._quarantine(iteration, owner, str(error))}"
                    passed_over.append((iteration, owner, words))
                    continue
                if manifest.run_id != self._run_id:  # good for others: it stays
                    words = f"is not used: {path} is of run {manifest.run_id}, this is {self._run_id}"
                    passed_over.append((iteration, owner, words))
                elif manifest.world_size != world_size:
                    others.append((owner, path, manifest))
                else:
                    found.append((iteration, owner, manifest.attempt))
            if others:
                unused = self._survey_others(by_rank, others, world_size)
                passed_over += [(iteration, owner, f"is not used: {why}") for owner, why in unused]
                whole += [] if unused else [iteration]
        return p.Survey(
            cycle=self.cycle,
            shards=found,
            passed_over=passed_over,
            whole=whole,
            encoded=sorted(self._store.encoded()),
        )

    def _survey_others(
        self, by_rank: Mapping[int, str], others: list[tuple[int, str, ShardManifest]], world_size: int
    ) -> list[tuple[int, str]]:
        """Look at shards of this run that another number of ranks has sealed; returns what of whom is not used."""
        why = ""
        if len(self.ranks) == world_size:
            try:
                wanted = range(min(others)[2].world_size)
                fit([ShardManifest.load(by_rank[rank]) for rank in wanted if rank in by_rank])
                return []
            except (OSError, DataError) as error:
                why = f", and they are not all here: {error.message if isinstance(error, DataError) else error}"
        # they stay until training goes on from something else
        return [
            (owner, f"{path} is of {manifest.world_size}{p.OTHER_WORLD}{world_size}{why}")
            for owner, path, manifest in others
        ]

    def _load(self, path: str, iteration: int, owner: int) -> ShardManifest:
        manifest = ShardManifest.load(path)
        if (manifest.iteration, manifest.rank) != (iteration, owner):
            raise DataError(f"{path} was renamed: it is of iteration {manifest.iteration}, rank {manifest.rank}")
        place = parse(manifest.slot)
        if place is None or place[0] != manifest.rank:
            raise DataError(f"{path} names the slot {manifest.slot!r}, which is not this rank's")
        self.ranks[manifest.rank].slots.holds(place[1], manifest.iteration)
        return manifest

    def lost(self, artefacts: list[tuple[int, int, str]]) -> None:
        """Take out shards that were found bad."""
        for iteration, owner, reason in artefacts:
            here = self._store.sealed().get(iteration, {})
            for one in here if owner == SHARDS else {owner} & here.keys() & self.ranks.keys():
                self._quarantine(iteration, one, reason)
                if one in self.ranks:
                    self.ranks[one].slots.free(iteration)

    def _quarantine(self, iteration: int, owner: int, reason: str) -> str:
        """Take a shard out; returns words about where it is now."""
        try:
            moved = self._store.quarantine(iteration, owner, reason)
        except (OSError, ResilError) as error:
            event(log, "not_quarantined", level=logging.ERROR, iteration=iteration, rank=owner, why=str(error))
            return f"it could not be moved away: {error}"
        event(log, "quarantined", level=logging.WARNING, iteration=iteration, rank=owner, why=reason, moved=moved)
        return f"moved to {moved}" if moved else "it is gone"

    def continue_from(self, iteration: int) -> None:
        """Training goes on from an iteration: newer shards are of another past, and must not mix with what comes.

        Older ones have had their day: every rank has loaded this one, from here or from the drained file.
        """
        self.keeping.restored = iteration
        self._layouts.submit(self._clear_staged)  # before slots are laid out: they need the space
        for newer in sorted(one for one in self._store.encoded() if one > iteration):
            try:
                self._store.forget(newer)
            except OSError as error:  # whoever reads it compares it with the shards
                event(log, "not_forgotten", level=logging.WARNING, iteration=newer, why=str(error))
        for rank in self.ranks.values():
            for newer in rank.slots.discard_above(iteration):
                event(log, "discarded", iteration=newer, rank=rank.rank, above=iteration)
        for newer, by_rank in self._store.sealed().items():
            for owner in by_rank if newer > iteration else ():
                if self._is_ours(newer, owner, by_rank[owner]):
                    self._quarantine(newer, owner, f"training went on from iteration {iteration}")

    def _clear_staged(self) -> None:
        """Thread of layouts: every rank has loaded what was staged for it."""
        try:
            staged.clear(self._job_dir)
        except OSError as error:
            event(log, "staged_not_cleared", level=logging.WARNING, why=str(error))

    def _is_ours(self, iteration: int, owner: int, path: str) -> bool:
        """Whether a shard of a rank that is not placed here is of this run."""
        try:
            manifest = ShardManifest.load(path)
        except (OSError, DataError):
            return False
        return (manifest.run_id, manifest.iteration, manifest.rank) == (self._run_id, iteration, owner)

    def all_sealed(self, iteration: int) -> None:
        """Hear that all ranks of the run have sealed an iteration."""
        if iteration > self.sealed_all and self._gone:
            try:
                self._clear_gone(iteration)
            except OSError as error:  # it is only kept longer
                event(log, "not_cleared", level=logging.WARNING, below=iteration, why=str(error))
        self.keeping.all_sealed(iteration)
        for rank in self.ranks.values():
            rank.results = {at: result for at, result in rank.results.items() if at > iteration}

    def plan(self, plan: p.Plan) -> None:
        """Hear what is restored."""
        self.lost(plan.lost)
        self.keeping.plan(plan.iteration, plan.protected, plan.durable, self._store.encoded())
        self.all_sealed(plan.complete)

    def _clear_gone(self, iteration: int) -> None:
        """Give back the space of ranks that there are no more, once nothing of them can be restored any more.

        They are those of more ranks on this one node; with an iteration that all of today's have sealed, theirs are as
        expendable as an own one is.
        """
        cleared, kept = set(), set()
        for at, by_rank in self._store.sealed().items():
            for owner in by_rank.keys() - self.ranks.keys():
                with pins.exclude(self._job_dir, at) as mine:
                    if mine and at < iteration and self._is_ours(at, owner, by_rank[owner]):
                        os.unlink(by_rank[owner])
                        event(log, "cleared", iteration=at, rank=owner, sealed_by_all=iteration)
                        cleared.add(owner)
                    else:
                        kept.add(owner)
        directory = os.path.join(self._job_dir, "slots")
        for name in os.listdir(directory):
            place = parse(name)
            if place is not None and place[0] in cleared - kept:
                os.unlink(os.path.join(directory, name))
        self._gone = bool(kept)

    # ranks

    def find(self, channel: Channel) -> Rank | None:
        """Rank of a connection."""
        return next((rank for rank in self.ranks.values() if rank.channel is channel), None)

    def gone(self, rank: Rank) -> None:
        """A rank's connection ended: what it has not handed over is lost."""
        rank.channel, rank.lease = None, None
        for iteration in rank.slots.free_unsealed(lambda at: at in rank.sealing):
            self._report(rank, self._failure(rank, iteration, "the rank ended", told=False))

    def hear(self, rank: Rank, message: p.Message, now: float) -> None:
        """Serve a rank."""
        match message:
            case p.Lease():
                rank.lease = (message, now + message.wait_s)
                self.serve_leases(now)
            case p.Seal():
                self._seal(rank, message)
            case p.Prepare():
                self._prepare(rank, message.layout)
            case p.GiveUp():
                rank.slots.refuse(message.iteration)
                self._report(rank, self._failure(rank, message.iteration, message.reason, told=True))
            case p.Leave():
                rank.left = True
            case _:
                pass

    @property
    def leases_wait(self) -> bool:
        """Whether a rank waits for a slot."""
        return any(rank.lease is not None for rank in self.ranks.values())

    def serve_leases(self, now: float) -> None:
        """Give out slots that became free, refuse those who waited long enough."""
        for rank in self.ranks.values():
            if rank.lease is None:
                continue
            lease, until = rank.lease
            reason = ""
            try:
                index = rank.slots.lease(
                    lease.iteration, self._expendable(rank.slots, last_try=now >= until), last_try=now >= until
                )
            except OSError as error:
                index = None
                # not the file's name: it is the directory that people can do something about
                reason = (
                    f"no slot can be given in {self._job_dir} of run {self._run_id}: {error.strerror or error}; make "
                    "that directory and what is in it writable for this user, or set another SLURM_RESIL_BB_ROOT"
                )
            if index is not None:
                rank.lease = None
                rank.send(p.Slot(iteration=lease.iteration, index=index))
            elif reason or now >= until + (PREPARING_S if rank.preparing is not None else 0.0):
                rank.lease = None
                reason = reason or f"no slot is free: {rank.slots.words()}; {self.keeping.words()}"
                rank.send(p.NoSlot(iteration=lease.iteration, reason=reason))

    # slots ahead of their first use

    def _prepare(self, rank: Rank, layout: str) -> None:
        if rank.preparing is not None:
            rank.send(p.Prepared(layout=layout, indices=[], reason=p.AT_IT))
            return
        rank.preparing = Preparing(layout)
        self._prepare_next(rank, rank.preparing)

    def _prepare_next(self, rank: Rank, work: Preparing, reason: str = "") -> None:
        index = None if reason else rank.slots.begin_preparing(work.done)
        if index is None:
            rank.preparing = None
            if reason:
                event(log, "not_prepared", level=logging.WARNING, rank=rank.rank, prepared=len(work.done), why=reason)
            indices = [one for one in work.done if rank.slots.is_free(one)]
            rank.send(p.Prepared(layout=work.layout, indices=indices, reason=reason))
            return
        future = self._layouts.submit(self._lay_out, rank, index, work.layout)
        future.add_done_callback(lambda done: self._later(lambda: self._laid_out(rank, work, index, done)))

    def _lay_out(self, rank: Rank, index: int, layout: str) -> bool:
        """Thread of its own: seals do not wait for it."""
        faults.point("agent.prepare")
        return self._store.prepare(rank.rank, index, rank.slots.count, layout)

    def _laid_out(self, rank: Rank, work: Preparing, index: int, future: Future[bool]) -> None:
        rank.slots.prepared(index)
        reason = ""
        try:
            if not future.result():
                reason = "the state has another shape by now"
        except (ResilError, OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        if not reason:
            work.done.append(index)
        self._prepare_next(rank, work, reason)

    def _expendable(self, slots: Slots, *, last_try: bool) -> Callable[[int], bool]:
        tight = last_try and slots.usable <= TIGHT_SLOTS
        return functools.partial(self.keeping.expendable, encoded=self._store.encoded(), tight=tight)

    # seals

    def _seal(self, rank: Rank, seal: p.Seal) -> None:
        iteration = seal.iteration
        done = rank.results.get(iteration)
        if isinstance(done, p.Sealed) or iteration in rank.sealing:
            if isinstance(done, p.Sealed):
                rank.send(p.ShardSealed(iteration=iteration))
            return
        try:
            draft = drafts.read(self._job_dir, seal.draft, f"the draft of rank {rank.rank}")
            draft = replace(draft, metrics=seal.metrics)
            place = parse(draft.slot)
            if (draft.rank, draft.iteration, draft.run_id) != (rank.rank, iteration, self._run_id):
                raise DataError(f"the draft is of run {draft.run_id} rank {draft.rank} iteration {draft.iteration}")
            if self._published(draft):
                # by an agent before this one, which may have told others: it must not be put at risk again
                self._report(rank, p.Sealed(iteration=iteration, rank=rank.rank, cycle=self.cycle))
                rank.send(p.ShardSealed(iteration=iteration))
                return
            if place is None or place[0] != rank.rank or not rank.slots.sealing(place[1], iteration):
                raise DataError(f"slot {draft.slot!r} was not given out for it")
        except DataError as error:
            self._seal_failed(rank, iteration, str(error))
            return
        began = time.monotonic()
        future = rank.sealing[iteration] = self._pool.submit(self._hash, rank, draft)
        done_call = functools.partial(self._sealed, rank, iteration, draft.costs_s, began, self.cycle)
        future.add_done_callback(functools.partial(self._hashed, done_call))

    def _published(self, draft: drafts.Draft) -> bool:
        """Whether the manifest of this very shard is there."""
        path = self._store.sealed().get(draft.iteration, {}).get(draft.rank)
        if path is None:
            return False
        with contextlib.suppress(FileNotFoundError, DataError):
            found = ShardManifest.load(path)
            return (found.slot, found.generation) == (draft.slot, draft.generation)
        return False

    def _hash(self, rank: Rank, draft: drafts.Draft) -> ShardManifest:
        """Thread of the pool."""
        faults.point("agent.seal")
        return self._store.seal(rank.descriptions.complete(draft))

    def _hashed(self, done: Callable[[Future[ShardManifest]], None], future: Future[ShardManifest]) -> None:
        """Thread of the pool."""
        self._later(functools.partial(done, future))

    def _sealed(
        self,
        rank: Rank,
        iteration: int,
        costs_s: dict[str, float],
        began: float,
        cycle: int,
        future: Future[ShardManifest],
    ) -> None:
        rank.sealing.pop(iteration, None)
        try:
            future.result()
        except (ResilError, OSError, ValueError) as error:
            self._seal_failed(rank, iteration, f"{type(error).__name__}: {error}")
            return
        faults.point("agent.sealed")
        rank.slots.sealed(iteration)
        costs = {**costs_s, "seal": time.monotonic() - began}
        if cycle == self.cycle:
            self._report(rank, p.Sealed(iteration=iteration, rank=rank.rank, cycle=cycle, costs_s=costs))
        rank.send(p.ShardSealed(iteration=iteration))

    def _seal_failed(self, rank: Rank, iteration: int, reason: str) -> None:
        event(log, "seal_failed", level=logging.ERROR, iteration=iteration, rank=rank.rank, why=reason)
        rank.slots.free(iteration)
        self._report(rank, self._failure(rank, iteration, reason, told=rank.channel is not None))
        rank.send(p.ShardFailed(iteration=iteration, reason=reason))

    def _failure(self, rank: Rank, iteration: int, reason: str, *, told: bool) -> p.Failed:
        return p.Failed(iteration=iteration, rank=rank.rank, cycle=self.cycle, reason=reason, told=told)

    def _report(self, rank: Rank, message: p.Sealed | p.Failed) -> None:
        rank.results[message.iteration] = message
        self._tell(message)

    def close(self) -> None:
        """End the threads once what is being sealed is done."""
        self._layouts.shutdown(wait=True)
        self._pool.shutdown(wait=True)


def _be_nice() -> None:
    """Hash with what the training leaves over: on Linux this is for the calling thread alone."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
