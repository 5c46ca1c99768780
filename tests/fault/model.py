"""The worlds of ``world.py``: what can happen next in one, what must hold in all, and the way through all of them."""

from __future__ import annotations

import functools
import gc
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import world as w
from parts import Bounds as Bounds
from parts import Parts, Rank, ViolationError, current
from parts import replaced as replaced

from slurm_resil.agent import desk as desks
from slurm_resil.agent import protocol as p
from slurm_resil.core import control as c

Event = tuple[Any, ...]


class World(Parts):
    """See the module."""

    def start(self) -> None:
        """Up to where all ranks train."""
        current[:] = [self]
        self._new_leader()
        for node in range(self.bounds.nodes):
            self._new_agent(node)
            self._connect(node)
        self._new_ranks()
        self.settle()
        for _ in range(self.bounds.warm):
            for rank in self.ranks:
                self.do(("step", rank.rank))
                self.do(("step", rank.rank))
            self.settle()
        assert all(rank.state == "idle" for rank in self.ranks), [rank.state for rank in self.ranks]

    def events(self) -> Iterator[Event]:
        """All that can happen next; what nobody needs for going on comes last."""
        yield from self._progress()
        for rank in self.ranks:
            if rank.alive and rank.state == "lease" and (rank.end is None or self.left["slow"]):
                yield ("no answer", rank.rank)
            if rank.state == "look" and self._waits(rank) and self.left["slow"]:
                yield ("tires", rank.rank)
            if rank.alive and rank.state != "new" and self.left["rank"]:
                yield ("rank dies", rank.rank)
        for node, agent in enumerate(self.agents):
            if agent is not None and self.left["agent"]:
                yield ("agent dies", node, False)
                if agent._channel is not None and agent._channel.other.inbox:
                    yield ("agent dies", node, True)
            if agent is not None and self.left["node"]:
                yield ("node dies", node)
            if agent is not None and agent._desk._pool.jobs and self.left["io"]:
                yield ("fails", node)
        if self.leader is not None and self.left["leader"]:
            yield ("leader dies", -1)
            yield from (("leader dies", node) for node, end in self.ups if end.other.inbox)
        if self.encode is not None and self.left["stop"]:
            yield ("encode stops",)
        if self.left["drain"] and self.told.announced > self.told.durable:
            yield ("durable",)
        for node, disk in enumerate(self.disks):
            if disk.pinned:
                yield ("unpin", node)
            elif self.left["pin"]:
                for iteration in sorted({one for one, _ in disk.manifests}):
                    yield ("pin", node, iteration)

    def _progress(self) -> Iterator[Event]:
        if self.notices and self.leader is not None:
            yield ("notice",)
        for rank in self.ranks:
            yield from self._of_rank(rank)
        for node, agent in enumerate(self.agents):
            if agent is None:
                yield ("agent starts", node)
                continue
            for number in range(min(len(agent._desk._pool.jobs), desks.SEALERS)):
                yield ("hash", node, number)
            if agent._inbox.calls or self._untidy(node):
                yield ("turn", node)
            channel = agent._channel
            if channel is None:
                if self.leader is not None:
                    yield ("connect", node)
            elif channel.inbox:
                yield ("down", node, 0, -1, 0)
                if self.bounds.buffered and channel.inbox[0]["t"] == "Propose":
                    for rank in self.ranks:
                        if rank.node == node and rank.alive:
                            yield from (("down", node, at, rank.rank, steps) for at in (1, 2) for steps in (1, 2, 3))
            elif channel.closed:
                yield ("closed", node)
        if self.leader is None:
            yield ("leader starts",)
        yield from self._of_encode()
        for number, (_, end) in enumerate(self.ups):
            if end.inbox or end.closed:
                yield ("up", number)
        if self.leader is not None and any(not rank.alive for rank in self.ranks):
            yield ("cycle",)

    def _of_encode(self) -> Iterator[Event]:
        """What the launcher does: the newest that all have sealed is encoded, or it is said that it will not be."""
        if self.encode is not None:
            left = set(range(self.bounds.nodes)) - self.encode[1]
            yield from (("publish", node) for node in left)
            if not left:
                yield ("encoded",)
        elif self.encodes and self.told.announced > self.judged and self.leader is not None:
            yield ("encode",) if self.left["encode"] else ("not encoded",)

    def _of_rank(self, rank: Rank) -> Iterator[Event]:
        if not rank.alive:
            return
        if rank.end is None and self.agents[rank.node] is not None:
            yield ("reconnect", rank.rank, False)
            if rank.pending and rank.state == "lease":
                yield ("reconnect", rank.rank, True)
        if rank.stores is not None and rank.stores.waiting:
            yield ("flush", rank.rank)
        if self._moves(rank):
            yield ("step", rank.rank)

    def _moves(self, rank: Rank) -> bool:
        if rank.state == "look":
            return not self._waits(rank)
        if rank.state == "idle":
            # the collective: the next iteration is over when everybody has come out of the one before
            return rank.iteration < self.bounds.iterations + self.probing and all(
                other.iteration > rank.iteration
                or (other.iteration == rank.iteration and other.state not in ("new", "look", "lease", "write"))
                for other in self.ranks
                if other is not rank
            )
        return rank.state == "write"

    def _untidy(self, node: int) -> bool:
        page = self.pages[node]
        if page is None:
            return False
        words = page.words
        saved = [words[page.block(local) + c.SAVED] for local in range(page.ranks)]
        return bool(words[c.PROPOSAL]) and words[c.DECISION] == c.COMMIT and min(saved) >= words[c.PROPOSAL]

    def do(self, event: Event) -> None:
        """Let one thing happen, and check what must hold."""
        current[:] = [self]
        name, *rest = event
        getattr(self, "_on_" + name.replace(" ", "_"))(*rest)
        self.check()

    def settle(self) -> None:
        """Let messages and hashes come to their end, without a step of a rank."""
        for _ in range(10_000):
            quiet = ("step", "notice", "cycle")
            event = next((one for one in self._progress() if one[0] not in quiet), None)
            if event is None:
                return
            self.do(event)
        raise ViolationError("it never settles")

    def _on_notice(self) -> None:
        self.notices -= 1
        self.leader.notice(w.notice())

    def _on_step(self, number: int) -> None:
        rank = self.ranks[number]
        assert rank.seat is not None
        assert rank.stores is not None
        if rank.state == "idle":
            rank.iteration += 1
            rank.seat.words[rank.seat.iteration] = rank.iteration
            rank.state = "look"
            if not self.bounds.buffered:
                rank.stores.flush()
                if not self._waits(rank):
                    self._look(rank)
        elif rank.state == "look":
            self._look(rank)
        else:
            self._wrote(rank)

    def _on_tires(self, number: int) -> None:
        self.left["slow"] -= 1
        self._look(self.ranks[number])

    def _on_no_answer(self, number: int) -> None:
        rank = self.ranks[number]
        self.left["slow"] -= rank.end is not None
        self._give_up(rank)

    def _on_flush(self, number: int) -> None:
        stores = self.ranks[number].stores
        assert stores is not None
        stores.flush()

    def _on_hash(self, node: int, number: int) -> None:
        self.agents[node]._desk._pool.jobs.pop(number).run()

    def _on_fails(self, node: int) -> None:
        self.left["io"] -= 1
        self.disks[node].broken = True
        self._on_hash(node, 0)
        self.disks[node].broken = False

    def _on_turn(self, node: int) -> None:
        self._run(node, once=True)

    def _on_down(self, node: int, at: int, number: int, steps: int) -> None:
        """A message of the leader; at its ``at``-th barrier a rank takes some steps first."""
        agent = self.agents[node]
        message = p.from_wire(agent._channel.inbox.pop(0))
        self.between = [at, number, steps]
        agent._inbox.put(functools.partial(agent._hear_leader, message))
        self._run(node)
        self.between = [0, -1, 0]

    def barrier(self) -> None:
        """In place of membarrier."""
        at, number, steps = self.between
        self.between = [at - 1, number, steps]
        if at == 1:
            rank = self.ranks[number]
            for _ in range(steps):
                if self._moves(rank) and rank.state != "write":
                    self._on_step(number)
        self.fence()

    def _on_closed(self, node: int) -> None:
        agent = self.agents[node]
        agent._inbox.put(agent._closed)
        self._run(node)

    def _on_connect(self, node: int) -> None:
        self._connect(node)

    def _on_up(self, number: int) -> None:
        _, end = self.ups[number]
        if self.leader is None:
            del self.ups[number]
        elif end.inbox:
            self.leader._hear(end, p.from_wire(end.inbox.pop(0)))
            self.leader._turn(w.CLOCK.now)
        else:
            del self.ups[number]
            self.leader._gone(end)
            self.leader._turn(w.CLOCK.now)

    def _on_encode(self) -> None:
        """All movers hold the shards, or one of them finds that they are gone."""
        self.left["encode"] -= 1
        iteration = self.told.announced
        if not all(self.shards(node, iteration) for node in range(self.bounds.nodes)):
            self._on_not_encoded()
            return
        self.encode = (iteration, set())
        for disk in self.disks:
            disk.held.add(iteration)

    def _on_publish(self, node: int) -> None:
        """The last one to publish is the end of the movers: nobody has heard of it yet."""
        assert self.encode is not None
        iteration, published = self.encode
        published.add(node)
        self.disks[node].encoded[iteration] = self.shards(node, iteration)
        if len(published) == self.bounds.nodes:
            self._let_go()

    def _let_go(self) -> None:
        for disk in self.disks:
            disk.held.clear()

    def _on_encoded(self) -> None:
        assert self.encode is not None
        iteration, self.encode = self.encode[0], None
        self.judged = max(self.judged, iteration)
        self.told.protected = max(self.told.protected, iteration)
        self.leader.protected(iteration)

    def _on_not_encoded(self) -> None:
        self.judged = self.told.announced
        self._unprotected(self.judged)

    def _on_encode_stops(self) -> None:
        assert self.encode is not None
        self.left["stop"] -= 1
        iteration, self.encode = self.encode[0], None
        self._let_go()
        self.judged = max(self.judged, iteration)
        self._unprotected(iteration)

    def _unprotected(self, iteration: int) -> None:
        if self.bounds.slots == 2:
            self.told.protected = 0  # there is no room for it and for the next saves
        self.leader.unprotected(iteration)

    def _on_durable(self) -> None:
        self.left["drain"] -= 1
        self.told.durable = self.told.announced
        self.leader.durable(self.told.durable)

    def _on_rank_dies(self, number: int) -> None:
        self.left["rank"] -= 1
        self._bury(self.ranks[number])

    def _bury(self, rank: Rank) -> None:
        rank.alive = False
        if rank.stores is not None:
            rank.stores.flush()
        page = self.pages[rank.node]
        if page is not None:
            page.occupied = any(one.alive for one in self.ranks if one.node == rank.node)
        agent = self.agents[rank.node]
        if agent is not None and rank.end is not None:
            agent._inbox.put(functools.partial(agent._rank_gone, rank.end.other))
            self._run(rank.node)
        rank.end = None

    def _on_cycle(self) -> None:
        """The launcher kills the others and starts all again."""
        for rank in self.ranks:
            if rank.alive:
                self._bury(rank)
        self._cancel()
        self.cycle += 1
        self.past += 1
        self._new_ranks()
        self.leader.start_cycle(self.cycle)

    def _cancel(self) -> None:
        """The launcher kills an encode; what is restored will be encoded anew."""
        self._let_go()
        self.encode, self.judged = None, self.told.protected

    def _on_agent_dies(self, node: int, lost: bool) -> None:
        """``lost``: what it has sent and nobody has received yet goes with it."""
        self.left["agent"] -= 1
        agent = self.agents[node]
        if agent._channel is not None:
            agent._channel.close()
            if lost:
                agent._channel.other.inbox.clear()
        self.agents[node] = None
        for rank in self.ranks:
            if rank.node == node:
                rank.end = None

    def _on_node_dies(self, node: int) -> None:
        """It comes back with nothing: what was announced is lost, unless it is elsewhere too."""
        self.left["node"] -= 1
        self.left["agent"] += 1
        for rank in self.ranks:
            if rank.node == node:
                self._bury(rank)
        self._on_agent_dies(node, True)
        self.disks[node], self.pages[node] = w.Disk(), None
        self._cancel()
        self.told.announced = self.told.protected = self.judged = 0
        self.whole_from = self.cycle + 1

    def _on_agent_starts(self, node: int) -> None:
        self._new_agent(node)

    def _on_leader_dies(self, lost: int) -> None:
        """``lost``: node to which what was said last does not get any more."""
        self.left["leader"] -= 1
        self.leader = None
        self._cancel()
        for node, end in self.ups:
            end.close()
            if node == lost:
                end.other.inbox.clear()
        self.ups.clear()

    def _on_leader_starts(self) -> None:
        self._new_leader()

    def _on_pin(self, node: int, iteration: int) -> None:
        self.left["pin"] -= 1
        self.disks[node].pinned.add(iteration)

    def _on_unpin(self, node: int) -> None:
        self.disks[node].pinned.clear()

    def _on_reconnect(self, number: int, lease_first: bool) -> None:
        rank = self.ranks[number]
        self._hello(rank)
        if rank.end is None:
            return
        if rank.outcome is not None and rank.state == "new":
            self._say(rank, rank.outcome)
        waits = rank.state == "lease"
        if waits and lease_first:
            self._lease(rank)
        messages, rank.unsaid = [*rank.pending.values(), *rank.unsaid], []
        for message in messages:
            self._say(rank, message)
        if waits and not lease_first:
            self._lease(rank)

    def check_end(self) -> None:
        """What must hold where nothing is left to happen: everything was done, and the next save works."""
        last = self.bounds.iterations
        if any(rank.iteration != last or rank.state != "idle" for rank in self.ranks):
            raise ViolationError(f"it stands still: {[(rank.state, rank.iteration) for rank in self.ranks]}")
        self.left = dict.fromkeys(self.left, 0)
        for disk in self.disks:
            disk.pinned.clear()
        self.probing = True
        self.bounds = replace(self.bounds, every=1)
        for _ in range(1000):
            event = next(self._progress(), None)
            if event is None:
                break
            self.do(event)
        if self.told.announced != last + 1:
            raise ViolationError(f"no save works any more: {self.told.announced} is the newest, of {last + 1}")


@dataclass
class Found:
    """What an exploration has found."""

    states: int = 0
    events: int = 0
    ends: int = 0
    all: bool = True


def explore(bounds: Bounds, *, most: int = 1_000_000, enough_s: float = 1e9) -> Found:
    """Come to every state of a world, by chance: to so many of them if it may not take longer.

    Raises:
        ViolationError: Something does not hold; says how it came to that.
    """
    began = time.monotonic()
    first = World(bounds)
    first.start()
    found, seen = Found(), {w.key(first)}
    waiting: list[tuple[bytes, tuple[Any, ...]]] = [(w.frozen(first), ())]
    chance = random.Random(1)
    while waiting:
        if found.states >= most or time.monotonic() > began + enough_s:
            found.all = False
            break
        # mostly on to an end, at times back to anywhere
        at = -1 if chance.random() < 0.9 else chance.randrange(len(waiting))
        waiting[at], waiting[-1] = waiting[-1], waiting[at]
        data, way = waiting.pop()
        found.states += 1
        if found.states % 200 == 0:
            gc.collect()
        world = w.thawed(data)
        events = list(world.events())
        chance.shuffle(events)
        found.events += len(events)
        try:
            if next(world._progress(), None) is None:  # deaths are not waited for
                found.ends += 1
                w.thawed(data).check_end()
            for event in events:
                world = w.thawed(data)
                try:
                    world.do(event)
                except ViolationError as violation:
                    raise ViolationError(f"{violation}\nlast: {event}") from violation
                key = w.key(world)
                if key not in seen:
                    seen.add(key)
                    waiting.append((w.frozen(world), (event, way)))
        except ViolationError as violation:
            raise ViolationError(f"{violation}\nby: {_steps(way)}") from violation
    return found


def _steps(way: tuple[Any, ...]) -> str:
    steps = []
    while way:
        event, way = way
        steps.append(" ".join(map(str, event)))
    return "; ".join(reversed(steps))
