"""The parts of a world and what its ranks do; what can happen in it is in ``model``."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import world as w

from slurm_resil.agent import agent as agents
from slurm_resil.agent import leader as leaders
from slurm_resil.agent import protocol as p
from slurm_resil.agent import seat as seats
from slurm_resil.core import control as c
from slurm_resil.format import draft as drafts
from slurm_resil.format.manifest import ShardManifest


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How large a world is.

    Attributes:
        every: Ranks save whenever so many iterations are complete; 0: only when asked.
        notices: How often somebody asks for a checkpoint.
        buffered: Whether a rank's stores reach the others late.
        warm: Iterations that are over, with all that belongs to them, when it begins.
        deaths: How often each may die: ``rank``, ``agent``, ``leader``; ``slow``: how often a rank does not wait
            for an answer any longer; ``pin``: how often somebody comes to read an iteration; ``node``: how often one
            is lost with all that is on it; ``io``: how often a shard cannot be sealed; ``encode``: how often what is
            sealed is encoded, ``stop``: how often that does not come to its end; ``drain``: how often one is durable.
    """

    nodes: int = 2
    per_node: int = 1
    slots: int = 2
    iterations: int = 3
    every: int = 1
    notices: int = 0
    buffered: bool = False
    warm: int = 0
    deaths: tuple[tuple[str, int], ...] = ()


class ViolationError(AssertionError):
    """Something that must hold does not."""


@dataclass
class Rank:
    """A rank: what session and link do, in few steps."""

    rank: int
    node: int
    local: int
    cycle: int
    past: int
    alive: bool = True
    seat: seats.Seat | None = None
    stores: w.Stores | None = None
    iteration: int = 0
    state: str = "new"  # new, idle, look, lease, write
    index: int = -1
    epoch: int = 0
    plan: int = 0
    outcome: p.RankLoaded | None = None
    loaded: tuple[int, int] = (0, 0)  # past and iteration that it began with
    end: w.End | None = None  # of its connection
    pending: dict[int, p.Seal] = field(default_factory=dict)
    unsaid: list[p.GiveUp] = field(default_factory=list)


class Parts:
    """A run: its leader, agents, ranks, disks and pages."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        names = ("rank", "agent", "leader", "slow", "pin", "node", "io", "encode", "stop", "drain")
        self.left = dict.fromkeys(names, 0) | dict(bounds.deaths)
        self.encodes = self.left["encode"] > 0
        self.encode: tuple[int, set[int]] | None = None  # iteration, and the nodes that have published their part
        self.judged = 0  # newest iteration that is known to be protected, or not to be
        self.notices = bounds.notices
        nodes = range(bounds.nodes)
        self.disks = [w.Disk() for _ in nodes]
        self.pages: list[w.Page | None] = [None for _ in nodes]
        self.agents: list[Any] = [None for _ in nodes]
        self.ups: list[tuple[int, w.End]] = []  # leader's ends, with their nodes
        self.memory: dict[int, Any] = {}
        self.saves: dict[int, dict[int, int]] = {}
        self.told = w.Told()
        self.cycle = self.past = self.whole_from = 0
        self.leader: Any = None
        self.ranks: list[Rank] = []
        self.probing = False
        self.between = [0, -1, 0]  # number of the barrier, rank, steps

    def _waits(self, rank: Rank) -> bool:
        """Whether the real ``look`` would wait for a decision."""
        assert rank.seat is not None
        epoch, target, decision, _ = rank.seat._read()
        return bool(target) and epoch != rank.seat._done and rank.iteration >= target and decision == c.OPEN

    def _look(self, rank: Rank) -> None:
        assert rank.seat is not None
        order = rank.seat.look(rank.iteration) if rank.seat.words[c.PROPOSAL] else seats.NOTHING
        rank.state, rank.epoch = "idle", 0
        every = self.bounds.every
        if order.kind is not seats.Kind.NOTHING:
            rank.epoch = order.epoch
            self.saves.setdefault(order.epoch, {})[rank.rank] = rank.iteration
        elif not every or rank.iteration % every:
            return
        rank.state = "lease"
        self._lease(rank)

    def _lease(self, rank: Rank) -> None:
        self._say(rank, p.Lease(iteration=rank.iteration, wait_s=20.0 if rank.epoch else 0.0))

    def _wrote(self, rank: Rank) -> None:
        disk, place = self.disks[rank.node], (rank.rank, rank.index)
        shard = disk.slots[place]
        if (shard.past, shard.iteration) != (rank.past, rank.iteration):
            raise ViolationError(f"two write slot {place}: {shard} and rank {rank.rank} at {rank.iteration}")
        disk.slots[place] = replace(shard, whole=True)
        manifest = ShardManifest(
            run_id="run",
            job_id=7,
            attempt=0,
            iteration=rank.iteration,
            rank=rank.rank,
            world_size=len(self.ranks),
            node=f"node{rank.node}",
            slot=f"{rank.rank}-{rank.index}.h5",
            generation=shard.generation,
            items=(),
            values={},
        )
        seal = rank.pending[rank.iteration] = p.Seal(iteration=rank.iteration, draft=drafts.to_wire(manifest, "", ()))
        self._acted(rank)
        self._say(rank, seal)

    def _acted(self, rank: Rank) -> None:
        rank.state, rank.index = "idle", -1
        assert rank.seat is not None
        if rank.epoch:
            rank.seat.acted(rank.iteration)
            if not self.bounds.buffered:
                rank.seat.words.flush()  # type: ignore[attr-defined]

    def _give_up(self, rank: Rank) -> None:
        iteration = rank.iteration
        self._acted(rank)
        message = p.GiveUp(iteration=iteration, reason="for the model")
        if rank.end is None:
            rank.unsaid.append(message)
        self._say(rank, message)

    def fence(self) -> None:
        for rank in self.ranks:
            if rank.stores is not None:
                rank.stores.flush()

    def _new_leader(self) -> None:
        bounds = self.bounds
        info = w.run_info(bounds.nodes, bounds.per_node, self.cycle)
        names = [f"node{node}" for node in range(bounds.nodes)]
        leader: Any = leaders.Leader(
            info=info, nodes=names, ranks_per_node=bounds.per_node, run_dir=".", host=None, interval_s=None
        )
        leader.events = self.told
        leader._decisions._memory = self.memory
        self.leader = leader

    def _new_agent(self, node: int) -> None:
        bounds, disk = self.bounds, self.disks[node]
        agent: Any = agents.Agent(w.config(node, bounds.nodes, bounds.per_node, bounds.slots), w.Store(disk))  # type: ignore[arg-type] # what is called of it
        agent._inbox, agent._next_beat, agent._ending = w.Inbox(), w.FAR, None
        agent._desk._later = agent._inbox.put
        for rank in agent._desk.ranks.values():
            rank.slots.disk, rank.descriptions = disk, w.Whole()
        agent._take_over()
        self.agents[node] = agent

    def _connect(self, node: int) -> None:
        here, there = w.pair()
        self.ups.append((node, there))
        agent = self.agents[node]
        agent._inbox.put(functools.partial(agent._opened, here))
        self._run(node)

    def _new_ranks(self) -> None:
        per_node = self.bounds.per_node
        self.ranks = [
            Rank(number, number // per_node, number % per_node, self.cycle, self.past)
            for number in range(self.bounds.nodes * per_node)
        ]
        for rank in self.ranks:
            if self.agents[rank.node] is not None:
                self._hello(rank)

    def _hello(self, rank: Rank) -> None:
        rank.end, there = w.pair()
        agent = self.agents[rank.node]
        hello = p.RankHello(
            rank=rank.rank,
            local_rank=rank.local,
            world_size=len(self.ranks),
            run_id="run",
            attempt=0,
            cycle=rank.cycle,
            pid=seats.os.getpid(),
            again=rank.seat is not None,
        )
        agent._inbox.put(functools.partial(agent._hear_rank, there, hello))
        self._run(rank.node)

    def _say(self, rank: Rank, message: p.Message) -> None:
        agent = self.agents[rank.node]
        if rank.end is not None and agent is not None:
            message = p.from_wire(p.to_wire(message))
            agent._inbox.put(functools.partial(agent._hear_rank, rank.end.other, message))
            self._run(rank.node)

    def _run(self, node: int, *, once: bool = False) -> None:
        """Let an agent do what is in front of it, and its ranks hear of it."""
        agent = self.agents[node]
        while True:
            agent._turn()
            for rank in self.ranks:
                while rank.alive and rank.node == node and rank.end is not None and rank.end.inbox:
                    self._hear(rank, p.from_wire(rank.end.inbox.pop(0)))
            if once or not agent._inbox.calls:
                return

    def _hear(self, rank: Rank, message: p.Message) -> None:
        match message:
            case p.Restore() if message.plan > rank.plan:
                rank.plan, rank.loaded = message.plan, self._load(rank, message)
                rank.outcome = p.RankLoaded(plan=message.plan, outcome="ok", reason="")
                self._say(rank, rank.outcome)
            case p.Start() if rank.seat is None and message.plan == rank.plan:
                page = self.pages[rank.node]
                assert page is not None
                page.occupied = True
                rank.stores = w.Stores(page.words)
                rank.seat = seats.Seat(page, rank.local, decision_wait_s=0.0)  # type: ignore[arg-type] # as good as one
                rank.stores.words = page.words
                rank.seat.words = rank.stores  # type: ignore[assignment] # as good as one
                rank.state, rank.iteration = "idle", rank.loaded[1]
            case p.Slot() if rank.state == "lease" and message.iteration == rank.iteration:
                self._begin(rank, message.index)
            case p.NoSlot() if rank.state == "lease" and message.iteration == rank.iteration:
                self._give_up(rank)
            case p.ShardSealed() | p.ShardFailed():
                rank.pending.pop(message.iteration, None)
            case p.Refuse():
                rank.end = None
            case _:
                pass

    def _load(self, rank: Rank, answer: p.Restore) -> tuple[int, int]:
        if answer.error:
            raise ViolationError(f"restore: {answer.error}")
        if answer.source == "fresh":
            return (self.past, 0)
        disk = self.disks[rank.node]
        manifest = disk.manifests.get((answer.iteration, rank.rank))
        if manifest is None or not disk.holds(manifest):
            raise ViolationError(f"rank {rank.rank} is to restore {answer.iteration}, which is not there")
        return (manifest.generation // 1000, answer.iteration)

    def _begin(self, rank: Rank, index: int) -> None:
        place, disk = (rank.rank, index), self.disks[rank.node]
        agent = self.agents[rank.node]
        for job in agent._desk._pool.jobs:
            if w.slots_.parse(job.arguments[1].slot) == place:
                raise ViolationError(f"slot {place} is written and hashed at a time")
        old = disk.slots.get(place)
        if old is not None and old.iteration in disk.pinned and self._kept(disk, rank.rank, old):
            raise ViolationError(f"slot {place} with iteration {old.iteration} is written while it is read")
        generation = self.past * 1000 + rank.iteration
        disk.slots[place] = w.Shard(self.past, rank.iteration, generation, False)
        rank.state, rank.index = "write", index

    @staticmethod
    def _kept(disk: w.Disk, rank: int, shard: w.Shard) -> bool:
        manifest = disk.manifests.get((shard.iteration, rank))
        return manifest is not None and manifest.generation == shard.generation

    def check(self) -> None:
        """Raise ViolationError if something does not hold."""
        for node, disk in enumerate(self.disks):
            for (iteration, rank), manifest in disk.manifests.items():
                if not disk.holds(manifest):
                    raise ViolationError(f"node {node}: iteration {iteration} of rank {rank} was overwritten")
        newest = self.restorable()
        if newest < self.told.announced:
            raise ViolationError(f"iteration {self.told.announced} was announced, {newest} can be restored")
        self._check_protected()
        for page in self.pages:
            if page is not None and page.words[c.CYCLE] > self.whole_from and page.words[c.SEALED_ALL] > newest:
                raise ViolationError(f"a page says that {page.words[c.SEALED_ALL]} is sealed, {newest} can be restored")
        for epoch, saves in self.saves.items():
            if len(set(saves.values())) > 1:
                raise ViolationError(f"epoch {epoch} is saved at {saves}")
        heard = [(page.words[c.EPOCH], page.words[c.DECISION]) for page in self.pages if page is not None]
        if any((epoch, c.COMMIT) in heard and (epoch, c.ABORT) in heard for epoch, _ in heard):
            raise ViolationError(f"committed here and aborted there: {heard}")
        if len({rank.loaded for rank in self.ranks if rank.state != "new"}) > 1:
            raise ViolationError(f"restored is a mix: {[rank.loaded for rank in self.ranks]}")

    def _check_protected(self) -> None:
        """What was called protected is on all nodes, shards and redundancy, so that any one of them may be lost."""
        protected = self.told.protected
        if protected <= self.told.durable:
            return
        for node, disk in enumerate(self.disks):
            made_of = self.shards(node, protected)
            if not made_of or disk.encoded.get(protected) != made_of:
                raise ViolationError(f"iteration {protected} is protected, and node {node} has given it away")
            for iteration, made_of in disk.encoded.items():
                shards = self.shards(node, iteration)
                if shards and shards != made_of:
                    raise ViolationError(f"node {node}: redundancy of iteration {iteration} is of another past")

    def shards(self, node: int, iteration: int) -> tuple[int, ...]:
        """Generations of the shards of an iteration that a node has; empty unless it has all."""
        disk, found = self.disks[node], []
        for rank in self.ranks:
            if rank.node == node:
                manifest = disk.manifests.get((iteration, rank.rank))
                if manifest is None:
                    return ()
                found.append(manifest.generation)
        return tuple(found)

    def restorable(self) -> int:
        """Newest iteration that all ranks could restore if everything died now, all of the same past."""
        found = 0
        per_node = self.bounds.per_node
        for iteration, _ in self.disks[0].manifests:
            shards = [self.disks[rank.rank // per_node].manifests.get((iteration, rank.rank)) for rank in self.ranks]
            if all(shard is not None for shard in shards):
                if len({shard.generation for shard in shards if shard is not None}) > 1:
                    raise ViolationError(f"iteration {iteration} is a mix of two pasts")
                found = max(found, iteration)
        return found


current: list[Parts] = []  # of which the pages are that agents make and open


class Pages:
    """In place of ``ControlPage``."""

    @staticmethod
    def create(path: str, ranks: int) -> w.Page:
        node = int(path.split("/")[2])
        page = current[0].pages[node] = w.Page(path, ranks)
        return page

    @staticmethod
    def open(path: str) -> w.Page:
        page = current[0].pages[int(path.split("/")[2])]
        if page is None:
            raise FileNotFoundError(path)
        return page


@contextmanager
def replaced() -> Iterator[pytest.MonkeyPatch]:
    """Put the model's parts in place of the real ones."""
    with w.replaced(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(c, "ControlPage", Pages)
        patch.setattr(c, "membarrier", lambda **_: current[0].barrier())
        gc.collect()
        gc.freeze()  # worlds are full of cycles: only they are looked through, and now and then is enough
        gc.disable()
        try:
            yield patch
        finally:
            gc.enable()
            gc.unfreeze()
