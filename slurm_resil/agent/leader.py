"""The leader: one per run, hosted by the launcher, or by the agent of node_rank 0 where there is none.

One thread (the hub's) owns all state and hears everything in one order: messages, what the host says, and time.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_resil.agent import events as e
from slurm_resil.agent import protocol as p
from slurm_resil.agent.agreement import Agreement, Progress, Verdict
from slurm_resil.agent.asking import Asking
from slurm_resil.agent.decisions import Decisions
from slurm_resil.agent.hub import TICK_S, Hub
from slurm_resil.agent.restoring import Restoring
from slurm_resil.agent.safety import Safety
from slurm_resil.agent.saves import Saves
from slurm_resil.agent.uplink import publish_leader
from slurm_resil.agent.wishes import Wishes
from slurm_resil.comm.auth import Auth, server_auth
from slurm_resil.comm.channel import Channel
from slurm_resil.core import faults, paths
from slurm_resil.core.costs import Costs
from slurm_resil.core.log import event
from slurm_resil.core.model import Notice, NoticeKind, RunInfo

STOP_WAIT_S = 600.0  # for a stop without a deadline to be saved
RETRY_S = 0.2  # before another proposal, unless one was only too low
SAVE_WAIT_S = 120.0  # for any other save to be complete
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Committed:
    proposal: p.Propose
    asked: float
    until: float


class Leader:
    """Agreement, restore decisions, heartbeats; runs in threads of its own.

    Args:
        info: Run; ``cycle`` is the first one.
        nodes: Names of the nodes, by node_rank; an empty name stands for any node.
        ranks_per_node: Ranks of each node; rank = node_rank * ranks_per_node + local_rank.
        run_dir: Run's directory on the parallel file system; it must exist.
        host: Address of this node that agents can reach, or loopback for one node; None: only agents of this process
            (:meth:`attach`).
        interval_s: Propose a checkpoint as often as this, or None.
        rebuilds: Whether the host answers RebuildWanted with :meth:`rebuilt`.
        auth: How agents prove who they are; default: MUNGE where it works, else a key file in ``run_dir``.

    Attributes:
        address: ``host:port``, empty without a host; also in ``leader.json`` of the run's directory.
        events: What happens, see agent.events.
        costs: Measured times, see core.costs.
    """

    def __init__(
        self,
        *,
        info: RunInfo,
        nodes: Sequence[str],
        ranks_per_node: int,
        run_dir: str,
        host: str | None,
        interval_s: float | None = None,
        rebuilds: bool = False,
        auth: Auth | None = None,
    ) -> None:
        self._info, self._run_dir = info, run_dir
        self._hub = Hub(nodes, hear=self._hear, gone=self._gone, turn=self._turn)
        self._nodes = self._hub.nodes
        self._per_node = ranks_per_node
        self._cycle = info.cycle
        self._agreement = Agreement(epoch=int(time.time() * 1000))
        self._decisions = Decisions(run_dir if os.access(run_dir, os.W_OK) else None)
        self._restoring = Restoring(run_dir, len(nodes), ranks_per_node, rebuilds=rebuilds)
        self._saves = Saves(self._world)
        self._committed: _Committed | None = None
        self._wishes = Wishes(interval_s)
        self._next_try = self._next_tick = 0.0
        self._asking = Asking(self._hub.send)
        self._safety = Safety()
        self._leaving = False
        self.costs = Costs.load(run_dir)
        self.events: queue.SimpleQueue[e.LeaderEvent] = queue.SimpleQueue()
        self.address = ""
        if host is not None:
            auth = auth or server_auth(run_dir)
            self._hub.listen(host, auth)
            self.address = self._hub.address
            publish_leader(run_dir, self.address, auth.name, job_id=info.job_id, attempt=info.attempt)
        self._hub.start()

    # what the host says

    def attach(self) -> Channel:
        """Connect an agent of this same process; returns its end."""
        return self._hub.attach()

    def start_cycle(self, cycle: int) -> None:
        """Say that the ranks of a cycle are being started: agents make a fresh control page, a plan is made."""
        self._hub.put(lambda: self._start_cycle(cycle))

    def notice(self, notice: Notice) -> None:
        """Give a reason to checkpoint now. Notices to stop are merged; the earliest deadline counts."""
        self._hub.put(lambda: self._notice(notice))

    def durable(self, iteration: int, *, drain_s: float | None = None) -> None:
        """Say that an iteration is durable, and how long its drain took (seconds)."""
        self._hub.put(lambda: self._is_safe(self._safety.durable(iteration), "drain", drain_s))

    def protected(self, iteration: int, *, encode_s: float | None = None) -> None:
        """Say that an iteration survives the loss of nodes, and how long its encode took (seconds)."""
        self._hub.put(lambda: self._is_safe(self._safety.protected(iteration), "encode", encode_s))

    def unprotected(self, iteration: int) -> None:
        """Say that an iteration will not be protected: nothing of it is kept for that."""
        self._hub.put(lambda: self._hub.tell_all(self._safety.unprotected(iteration)))

    def rebuilt(self, iteration: int, *, ok: bool) -> None:
        """Say how the rebuild of an iteration has ended: the plan is made from what is there now."""
        self._hub.put(lambda: self._is_rebuilt(iteration, ok=ok))

    def goodbye(self) -> None:
        """Tell all agents to end once their ranks are gone."""
        self._hub.put(self._goodbye)

    @property
    def iteration(self) -> int:
        """Newest iteration that any rank of this cycle has published, 0 before the first."""
        return max(node.progress.newest for node in self._nodes)

    @property
    def sealed_all(self) -> int:
        """Newest iteration that all ranks have sealed, 0 for none."""
        return self._saves.newest

    @property
    def connected(self) -> int:
        """Number of agents that are connected."""
        return self._hub.connected

    def close(self) -> None:
        """Stop. Agents that were not told goodbye go on and look for a new leader."""
        self._hub.close()

    # what agents say

    def _hear(self, channel: Channel, message: p.Message) -> None:
        now = time.monotonic()
        if isinstance(message, p.Hello):
            self._hello(channel, message, now)
            return
        if isinstance(message, p.Ask):
            self._ask(channel, message, now)
            return
        place = self._hub.place(channel)
        if place is None:
            return
        node = self._nodes[place]
        node.heard = now
        match message:
            case p.Beat():
                node.report(message.newest, message.rate, now)
            case p.Survey() if message.cycle == self._cycle:
                self._restoring.survey(place, message)
                self._plan()
            case p.Loaded():
                self._loaded(message)
            case p.Vote():
                node.report(message.newest, None, now)
                faults.point("leader.vote")
                self._conclude(
                    self._agreement.vote(place, message.epoch, yes=message.yes, newest=message.newest, now=now)
                )
            case p.Sealed() if message.cycle == self._cycle:
                self._sealed(message, now)
            case p.Failed() if message.cycle == self._cycle:
                rank = message.rank
                self._fail(message.iteration, f"rank {rank}: {message.reason}", rank if message.told else None)
            case p.Noticed():
                kind = NoticeKind(message.kind)
                self._notice(Notice(kind=kind, stop=message.stop, deadline_s=message.deadline_s, source=message.source))
            case p.Bye():
                node.channel, node.broken, node.lost = None, None, True
                channel.close()
            case _:
                pass

    def _hello(self, channel: Channel, hello: p.Hello, now: float) -> None:
        why = self._hub.unwanted(hello, self._info)
        if why:
            event(log, "agent_refused", level=logging.WARNING, node=hello.node, why=why)
            self._hub.send(channel, p.Refused(reason=why))
            channel.close()
            return
        node = self._nodes[hello.node_rank]
        if node.channel is not None and node.channel is not channel:
            self._conclude(self._agreement.lost(hello.node_rank))
            node.channel.close()
        if node.channel is None:
            self.events.put(e.NodeJoined(node=node.name))
        node.channel, node.pid, node.heard = channel, hello.pid, now
        node.broken, node.lost = None, False
        self._agreement.raise_epoch(hello.epoch)
        self._hub.send(channel, p.Cycle(cycle=self._cycle))
        restoring = self._restoring
        restoring.number = max(restoring.number, hello.plan)
        news = hello.cycle == self._cycle and self._saves.complete(hello.sealed_all)
        if hello.cycle == self._cycle and hello.going and not restoring.going:
            self._take_over(hello)
        if restoring.plan is not None:
            self._hub.send(channel, restoring.plan)
        if restoring.going:
            self._hub.send(channel, p.Go(plan=restoring.number))
        if hello.voted:
            self._hub.send(channel, self._decided(hello.voted))
        for said in self._safety.news():
            self._hub.send(channel, said)
        if news:
            self._is_complete(hello.sealed_all)  # the others may not have heard it
        elif self._saves.newest:
            self._hub.send(channel, p.SealedAll(iteration=self._saves.newest))
        for iteration in self._saves.given_up:
            self._hub.send(channel, p.Abandon(iteration=iteration))
        if self._leaving:
            self._hub.send(channel, p.Goodbye())

    def _take_over(self, hello: p.Hello) -> None:
        """This leader is new, and the ranks train already: what one agent has heard is so."""
        self._restoring.resume(hello.plan)
        self._wishes.train(time.monotonic())
        found = self._decisions.newest(attempt=self._info.attempt, cycle=self._cycle)
        if found is not None and found.iteration > self._saves.newest and self._committed is None:
            proposal = p.Propose(
                epoch=found.epoch, iteration=found.iteration, stop=found.stop, deadline_s=found.deadline_s
            )
            now = time.monotonic()
            self._committed = _Committed(proposal, now, self._limit(proposal, now))
        self._hub.tell_all(p.Go(plan=hello.plan))
        event(log, "leader_took_over", cycle=self._cycle, sealed_all=self._saves.newest)

    def _decided(self, epoch: int) -> p.Decide:
        """Return the decision on record; what was never decided is aborted, for good."""
        found = self._decisions.read(epoch)
        if found is not None:
            return found[0]
        abort = p.Decide(epoch=epoch, commit=False, iteration=0, stop=False)
        if self._agreement.open is not None and self._agreement.open.epoch == epoch:
            self._conclude(self._agreement.abort("an agent came back without its vote"))
            return abort
        return self._record(abort)

    def _gone(self, channel: Channel) -> None:
        self._asking.forget(channel)
        for place, node in enumerate(self._nodes):
            if node.channel is channel:
                node.channel, node.broken = None, time.monotonic()
                self._conclude(self._agreement.lost(place))

    # restoring

    def _start_cycle(self, cycle: int) -> None:
        self._conclude(self._agreement.abort(f"cycle {cycle} starts"))
        self._cycle = cycle
        self._committed = None
        self._saves = Saves(self._world)  # the plan says what is complete; iterations of before will come again
        self._wishes.begin()
        self._restoring.start()
        for node in self._nodes:
            node.progress = Progress()
        self._hub.tell_all(p.Cycle(cycle=cycle))

    def _plan(self) -> None:
        lacking = self._restoring.rebuild()
        if lacking is not None:
            iteration, places = lacking
            self.events.put(e.RebuildWanted(iteration=iteration, nodes=[self._nodes[place].name for place in places]))
        plan = self._restoring.make(self._cycle)
        if plan is None:
            return
        self._safety.plan(plan)
        event(log, "plan", number=plan.number, iteration=plan.iteration, error=plan.error, cycle=self._cycle)
        self._saves = Saves(self._world, newest=plan.complete)
        self._hub.tell_all(plan)
        for aside in self._restoring.set_aside(plan):
            self.events.put(aside)
        if plan.error:
            failed = self._restoring.failed
            why, rank = (failed.reason, failed.rank) if failed is not None else (plan.error, None)
            self.events.put(e.RestoreFailed(cycle=self._cycle, why=why, rank=rank, final=plan.final))

    def _loaded(self, loaded: p.Loaded) -> None:
        restoring = self._restoring
        if restoring.plan is None or loaded.plan != restoring.number or restoring.going:
            return
        if loaded.outcome != "ok":
            event(log, "restore_failed", level=logging.WARNING, rank=loaded.rank, why=loaded.reason)
            restoring.refuse(loaded)
            if loaded.outcome == "bad" and restoring.may_rebuild(restoring.plan.iteration):
                self._look_again()
            else:
                self._plan()
        elif restoring.loaded(loaded.rank):
            self._hub.tell_all(p.Go(plan=restoring.number))
            self._wishes.train(time.monotonic())
            plan = restoring.plan
            self.events.put(e.Restored(cycle=self._cycle, iteration=plan.iteration, protected=plan.protected))

    def _is_rebuilt(self, iteration: int, *, ok: bool) -> None:
        if self._restoring.rebuilt(iteration, ok=ok):
            self._look_again()
        else:
            self._plan()

    def _look_again(self) -> None:
        """Have the nodes take out what is bad, and say what they have."""
        self._restoring.look_again()
        self._hub.tell_all(p.Cycle(cycle=self._cycle, lost=self._restoring.lost))

    # agreement

    def _propose(self, now: float, *, stop: bool) -> None:
        progress = {place: node.progress for place, node in enumerate(self._nodes)}
        asked = self._wishes.stop
        deadline_s = asked.deadline_s if stop and asked is not None else None
        proposal = self._agreement.propose(progress, now, stop=stop, deadline_s=deadline_s)
        faults.point("leader.propose")
        self._hub.tell_all(proposal)

    def _conclude(self, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        proposal, now = verdict.proposal, time.monotonic()
        decide = p.Decide(
            epoch=proposal.epoch,
            commit=verdict.commit,
            iteration=proposal.iteration,
            stop=proposal.stop,
            deadline_s=proposal.deadline_s,
        )
        faults.point("leader.before_record")
        if verdict.commit:
            decide = self._record(decide)
        faults.point("leader.after_record")
        event(
            log,
            "commit" if decide.commit else "abort",
            epoch=decide.epoch,
            iteration=decide.iteration,
            stop=decide.stop,
            why=verdict.why,
        )
        self._hub.tell_all(decide)
        if decide.commit:
            self._committed = _Committed(proposal, now, self._limit(proposal, now))
            self._wishes.committed()
        else:
            self._next_try = now if verdict.too_low else now + RETRY_S

    def _record(self, decide: p.Decide) -> p.Decide:
        try:
            return self._decisions.record(decide, attempt=self._info.attempt, cycle=self._cycle)
        except OSError as error:
            event(log, "decision_not_recorded", level=logging.ERROR, path=self._run_dir, why=str(error))
            return p.Decide(epoch=decide.epoch, commit=False, iteration=decide.iteration, stop=decide.stop)

    def _limit(self, proposal: p.Propose, now: float) -> float:
        if not proposal.stop:
            return now + self._save_wait()
        if proposal.deadline_s is None:
            return now + STOP_WAIT_S
        return now + max(0.0, proposal.deadline_s - time.time())

    def _save_wait(self) -> float:
        rate = max(node.progress.rate for node in self._nodes)
        return SAVE_WAIT_S + (20 / rate if rate > 0 else 0.0)

    # saves

    def _sealed(self, sealed: p.Sealed, now: float) -> None:
        for name, seconds in sealed.costs_s.items():
            self.costs.add(name, seconds)
        since = self._saves.since(sealed.iteration)
        if not self._saves.sealed(sealed.iteration, sealed.rank, now):
            return
        committed = self._committed
        if committed is not None and sealed.iteration >= committed.proposal.iteration:
            self.costs.add("save", now - committed.asked)
        elif since is not None:
            self.costs.add("save", now - since)
        self._save_costs()
        self.events.put(e.SealedAll(iteration=sealed.iteration))
        self._wishes.train(now)
        self._answer(now)
        self._is_complete(sealed.iteration)

    def _is_complete(self, iteration: int) -> None:
        self._hub.tell_all(p.SealedAll(iteration=iteration))
        committed = self._committed
        if committed is not None and iteration >= committed.proposal.iteration:
            self._finish(committed, saved=True)

    def _fail(self, iteration: int, why: str, told_by: int | None = None) -> None:
        if not self._saves.failed(iteration):
            return
        event(log, "save_failed", level=logging.ERROR, iteration=iteration, why=why)
        self._hub.tell_all(p.Abandon(iteration=iteration))
        self.events.put(e.SaveFailed(iteration=iteration, why=why, told_by=told_by))
        committed = self._committed
        if committed is not None and iteration >= committed.proposal.iteration:
            self._finish(committed, saved=False)

    def _finish(self, committed: _Committed, *, saved: bool) -> None:
        self._committed = None
        self._wishes.train(time.monotonic())
        if committed.proposal.stop:
            self._wishes.stopped = True
            self.events.put(e.StopReached(iteration=self._saves.newest, saved=saved))

    def _save_costs(self) -> None:
        try:
            self.costs.save(self._run_dir)
        except OSError as error:
            event(log, "costs_not_saved", level=logging.WARNING, path=paths.costs(self._run_dir), why=str(error))

    def _is_safe(self, said: p.Message, cost: str, seconds: float | None) -> None:
        if seconds is not None:
            self.costs.add(cost, seconds)
            self._save_costs()
        self._hub.tell_all(said)
        self._answer(time.monotonic())

    # notices

    def _notice(self, notice: Notice) -> None:
        if self._wishes.hear(notice):
            self.events.put(e.NoticeSeen(notice=notice))
        committed, stop = self._committed, self._wishes.stop
        if stop is not None and stop.deadline_s is not None and committed is not None and committed.proposal.stop:
            limit = time.monotonic() + max(0.0, stop.deadline_s - time.time())
            self._committed = _Committed(committed.proposal, committed.asked, min(limit, committed.until))
            self._hub.tell_all(p.Deadline(deadline_s=stop.deadline_s))

    def _ask(self, channel: Channel, ask: p.Ask, now: float) -> None:
        self._asking.add(channel, ask, above=self.iteration, now=now)
        self._notice(Notice(kind=NoticeKind.PERSON, stop=ask.stop, source=f"asked by uid {channel.peer_uid}"))

    def _answer(self, now: float) -> None:
        self._asking.answer(self._safety.levels(self._saves.newest), now)

    # time

    def _turn(self, now: float) -> None:
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._tick(now)
        self._maybe_propose(now)

    def _tick(self, now: float) -> None:
        for node, why in self._hub.check(now):
            self.events.put(e.NodeLost(node=node.name, why=why))
        self._conclude(self._agreement.tick(now))
        for iteration in self._saves.overdue(now, self._save_wait()):
            if self._committed is None or not self._committed.proposal.stop:
                self._fail(iteration, "not sealed by all ranks in time")
        committed = self._committed
        if committed is not None and now >= committed.until:
            self._fail(committed.proposal.iteration, "not saved by all ranks in time")
            if self._committed is committed:  # given up before
                self._finish(committed, saved=False)
        self._answer(now)

    def _maybe_propose(self, now: float) -> None:
        if self._agreement.open is not None or self._committed is not None or now < self._next_try:
            return
        if not self._restoring.going or self._hub.connected < len(self._nodes):
            return
        stop = self._wishes.next(now)
        if stop is not None:
            self._propose(now, stop=stop)

    # sending

    def _goodbye(self) -> None:
        self._leaving = True
        self._hub.tell_all(p.Goodbye())

    @property
    def _world(self) -> int:
        return len(self._nodes) * self._per_node
